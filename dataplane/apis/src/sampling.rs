//! How a client says that tokens are to be drawn.
//!
//! The names are those of the OpenAI APIs with the extensions that SGLang and vLLM document, the same in every API. Ranges are the
//! engines' own: what every engine would refuse is refused here, with the field's name, before any engine hears of it.

use std::ops::RangeInclusive;

use serde_json::Value;

use crate::fields::{Fields, string, token_id, too_many};
use crate::generation::Sampling;
use crate::limits;
use crate::refusal::Refusal;

/// No upper bound but that of the engines' 32-bit floats.
const ANY: f64 = f64::MAX;
/// Frequency and presence penalties (OpenAI: -2 to 2).
const PENALTY: RangeInclusive<f64> = -2.0..=2.0;
/// Biases (OpenAI: -100 to 100).
const BIAS: RangeInclusive<f64> = -100.0..=100.0;
/// Limits on tokens fit the engines' fields.
pub(crate) const MOST_TOKENS: u32 = i32::MAX as u32;

/// Everything but the limit on tokens, whose name differs from API to API.
pub(crate) fn read(fields: &mut Fields) -> Result<Sampling, Refusal> {
    let top_p = fields.number("top_p", 0.0..=1.0)?;
    if top_p == Some(0.0) {
        return Err(Refusal::value(&fields.path("top_p"), "must be above 0"));
    }
    let repetition_penalty = fields.number("repetition_penalty", 0.0..=ANY)?;
    if repetition_penalty == Some(0.0) {
        return Err(Refusal::value(&fields.path("repetition_penalty"), "must be above 0"));
    }
    // vLLM writes "all candidates" as 0 too.
    let top_k =
        fields.integer("top_k", -1..=i64::from(i32::MAX))?.map(|top_k| if top_k == 0 { -1 } else { top_k as i32 });
    let seed = match fields.integer("sampling_seed", 0..=i64::MAX)? {
        Some(seed) => Some(seed),
        None => fields.integer("seed", 0..=i64::MAX)?,
    };
    let min_tokens = match fields.count("min_tokens", 0..=MOST_TOKENS)? {
        Some(tokens) => Some(tokens),
        None => fields.count("min_new_tokens", 0..=MOST_TOKENS)?,
    };
    let no_stop_trim = fields.boolean("no_stop_trim")?.unwrap_or(false);
    Ok(Sampling {
        temperature: fields.number("temperature", 0.0..=ANY)?,
        top_p,
        top_k,
        min_p: fields.number("min_p", 0.0..=1.0)?,
        frequency_penalty: fields.number("frequency_penalty", PENALTY)?,
        presence_penalty: fields.number("presence_penalty", PENALTY)?,
        repetition_penalty,
        max_tokens: None,
        min_tokens,
        stop: stop(fields, "stop")?,
        stop_token_ids: stop_token_ids(fields)?,
        ignore_eos: fields.boolean("ignore_eos")?.unwrap_or(false),
        keep_stop: no_stop_trim || fields.boolean("include_stop_str_in_output")?.unwrap_or(false),
        seed,
        logit_bias: logit_bias(fields)?,
    })
}

/// A stop string or several.
pub(crate) fn stop(fields: &mut Fields, name: &str) -> Result<Vec<String>, Refusal> {
    let path = fields.path(name);
    let wrong = || Refusal::wrong_type(&path, "a string or an array of strings");
    let stops = match fields.value(name) {
        None => Vec::new(),
        Some(Value::String(stop)) => vec![stop],
        Some(Value::Array(stops)) => stops.into_iter().map(string).collect::<Option<_>>().ok_or_else(wrong)?,
        Some(_) => return Err(wrong()),
    };
    if stops.len() > limits::STOPS {
        return Err(too_many(&path, limits::STOPS));
    }
    if stops.iter().any(String::is_empty) {
        return Err(Refusal::value(&path, "may not have an empty string"));
    }
    if stops.iter().any(|stop| stop.len() > limits::STOP_BYTES) {
        return Err(Refusal::value(&path, &format!("may have strings of at most {} bytes", limits::STOP_BYTES)));
    }
    Ok(stops)
}

fn stop_token_ids(fields: &mut Fields) -> Result<Vec<u32>, Refusal> {
    let Some(ids) = fields.array("stop_token_ids", limits::STOPS)? else { return Ok(Vec::new()) };
    crate::fields::token_ids(&ids)
        .ok_or_else(|| Refusal::wrong_type(&fields.path("stop_token_ids"), "an array of token ids"))
}

fn logit_bias(fields: &mut Fields) -> Result<Vec<(u32, f32)>, Refusal> {
    let path = fields.path("logit_bias");
    let Some(biases) = fields.map("logit_bias")? else { return Ok(Vec::new()) };
    if biases.len() > limits::BIASES {
        return Err(too_many(&path, limits::BIASES));
    }
    let mut read = Vec::with_capacity(biases.len());
    for (token, bias) in biases {
        let id = token.parse::<u32>().ok().filter(|id| token_id(&Value::from(*id)).is_some());
        let id = id.ok_or_else(|| Refusal::value(&path, "must have token ids as its keys"))?;
        let bias = bias.as_f64().ok_or_else(|| Refusal::wrong_type(&format!("{path}.{token}"), "a number"))?;
        if !BIAS.contains(&bias) {
            return Err(Refusal::value(&format!("{path}.{token}"), "must be between -100 and 100"));
        }
        read.push((id, bias as f32));
    }
    Ok(read)
}

/// `n`, at least 1.
pub(crate) fn samples(fields: &mut Fields) -> Result<u32, Refusal> {
    Ok(fields.integer("n", 1..=limits::SAMPLES)?.map_or(1, |n| n as u32))
}

/// The client's own id of the request.
pub(crate) fn request_id(fields: &mut Fields) -> Result<Option<String>, Refusal> {
    let id = fields.string("rid")?;
    match &id {
        Some(id) if id.is_empty() || id.len() > limits::ID_BYTES => {
            Err(Refusal::value("rid", &format!("must have between 1 and {} bytes", limits::ID_BYTES)))
        }
        _ => Ok(id),
    }
}

/// Whether a stream is wanted, and whether it ends with the usage.
pub(crate) fn stream(fields: &mut Fields) -> Result<(bool, bool), Refusal> {
    let stream = fields.boolean("stream")?.unwrap_or(false);
    let usage = match fields.object("stream_options")? {
        Some(mut options) => options.boolean("include_usage")?.unwrap_or(false),
        None => false,
    };
    Ok((stream, stream && usage))
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
mod tests {
    use super::*;
    use serde_json::json;

    fn of(value: Value) -> Result<Sampling, Refusal> {
        read(&mut Fields::parse(value.to_string().as_bytes()).unwrap())
    }

    #[test]
    fn every_documented_field_is_read() {
        let sampling = of(json!({
            "temperature": 0.5, "top_p": 0.9, "top_k": 40, "min_p": 0.1, "frequency_penalty": -2, "presence_penalty": 2,
            "repetition_penalty": 1.1, "min_tokens": 3, "stop": ["a", "b"], "stop_token_ids": [7], "ignore_eos": true,
            "include_stop_str_in_output": true, "seed": 11, "logit_bias": {"5": -100}
        }));
        let expected = Sampling {
            temperature: Some(0.5),
            top_p: Some(0.9),
            top_k: Some(40),
            min_p: Some(0.1),
            frequency_penalty: Some(-2.0),
            presence_penalty: Some(2.0),
            repetition_penalty: Some(1.1),
            max_tokens: None,
            min_tokens: Some(3),
            stop: vec!["a".to_owned(), "b".to_owned()],
            stop_token_ids: vec![7],
            ignore_eos: true,
            keep_stop: true,
            seed: Some(11),
            logit_bias: vec![(5, -100.0)],
        };
        assert_eq!(sampling, Ok(expected));
    }

    #[test]
    fn what_is_left_open_stays_open() {
        assert_eq!(of(json!({"temperature": null})), Ok(Sampling::default()));
    }

    #[test]
    fn spellings_of_one_thing_mean_the_same() {
        assert_eq!(of(json!({"stop": "x"})).unwrap().stop, ["x"]);
        assert_eq!(of(json!({"top_k": 0})).unwrap().top_k, Some(-1), "vLLM: 0 is all");
        assert!(of(json!({"no_stop_trim": true})).unwrap().keep_stop, "SGLang's name");
        assert_eq!(of(json!({"min_new_tokens": 2})).unwrap().min_tokens, Some(2), "SGLang's name");
        assert_eq!(of(json!({"sampling_seed": 1, "seed": 2})).unwrap().seed, Some(1), "the more special name wins");
    }

    #[test]
    fn what_no_engine_takes_is_refused_with_the_name_of_the_field() {
        for (field, value, code) in [
            ("temperature", json!(-0.1), "invalid_value"),
            ("temperature", json!("hot"), "invalid_type"),
            ("temperature", json!(1e300), "invalid_value"),
            ("top_p", json!(0), "invalid_value"),
            ("top_p", json!(1.01), "invalid_value"),
            ("top_k", json!(-2), "invalid_value"),
            ("top_k", json!(1.5), "invalid_type"),
            ("min_p", json!(2), "invalid_value"),
            ("frequency_penalty", json!(2.1), "invalid_value"),
            ("presence_penalty", json!(-2.1), "invalid_value"),
            ("repetition_penalty", json!(0), "invalid_value"),
            ("min_tokens", json!(-1), "invalid_value"),
            ("stop", json!(1), "invalid_type"),
            ("stop", json!(["a", 1]), "invalid_type"),
            ("stop", json!([""]), "invalid_value"),
            ("stop", json!("x".repeat(5_000)), "invalid_value"),
            ("stop", json!(vec!["x"; 257]), "invalid_value"),
            ("stop_token_ids", json!([-1]), "invalid_type"),
            ("ignore_eos", json!(1), "invalid_type"),
            ("seed", json!(-1), "invalid_value"),
            ("sampling_seed", json!(-1), "invalid_value"),
            ("logit_bias", json!([1]), "invalid_type"),
            ("logit_bias", json!({"x": 1}), "invalid_value"),
            ("logit_bias", json!({"1": 101}), "invalid_value"),
            ("logit_bias", json!({"1": "x"}), "invalid_type"),
        ] {
            let refusal = of(json!({field: value})).unwrap_err();
            assert_eq!((refusal.status, refusal.code), (400, code), "{field} {value}");
            assert!(refusal.message.contains(field), "{}", refusal.message);
        }
    }
}
