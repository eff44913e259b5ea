//! Calls in JSON or tags, after a mark of the family's within the text.
//!
//! Each function below reads what follows one mark. It fails where the text is not what the family writes; what has been
//! gone over since the last thing that was output is content then.

use super::Calls;
use super::arguments::{Arguments, Kind};
use super::cursor::{Cursor, Malformed};
use super::json::{FIELDS, Fields, NAME};
use super::names::ToolParser;
use crate::markers::Markers;

/// Bytes of one parameter that comes as a tag.
const PARAMETER: usize = 1 << 20;

/// Reads text with calls in it to the end.
pub(super) async fn read(cursor: &mut Cursor, calls: &mut Calls, parser: ToolParser) {
    let markers = Markers::new(parser.begins());
    let mut after = calls.count > 0;
    while let Some(number) = cursor.pass_trimmed(&markers, after).await {
        let well = match parser {
            ToolParser::Qwen => hermes(cursor, calls).await,
            ToolParser::QwenXml => function(cursor, calls).await,
            ToolParser::Glm => pairs(cursor, calls).await,
            ToolParser::Mistral => mistral(cursor, calls).await,
            ToolParser::DeepSeek => deepseek(cursor, calls).await,
            ToolParser::Kimi => kimi(cursor, calls).await,
            ToolParser::Cohere => cohere(cursor, calls, number).await,
            ToolParser::MiniMax => invocations(cursor, calls, &MINIMAX).await,
            ToolParser::DeepSeek32 => invocations(cursor, calls, &DSML_32).await,
            ToolParser::DeepSeek4 => invocations(cursor, calls, &DSML_4).await,
            ToolParser::Step3 => invocations(cursor, calls, &STEP3).await,
            _ => objects(cursor, calls).await,
        };
        after = well.is_ok();
        cursor.conclude(well, calls.count > 0).await;
    }
}

/// Reads calls that are the text itself, from its first character.
pub(super) async fn read_bare(cursor: &mut Cursor, calls: &mut Calls) {
    cursor.mark();
    cursor.space().await;
    let well = match cursor.peek().await {
        Some('{') => objects(cursor, calls).await,
        Some('[') => array(cursor, calls, FIELDS).await,
        _ => Err(Malformed),
    };
    cursor.conclude(well, calls.count > 0).await;
}

/// Names of tools, as opposed to text that stands where one is expected.
fn name(text: &str) -> Result<&str, Malformed> {
    let name = text.trim();
    let fits = |next: char| next.is_alphanumeric() || "_-.:/".contains(next);
    if !name.is_empty() && name.chars().all(fits) { Ok(name) } else { Err(Malformed) }
}

/// JSON objects in a row, `;` or `,` between them.
async fn objects(cursor: &mut Cursor, calls: &mut Calls) -> Result<(), Malformed> {
    loop {
        cursor.space().await;
        cursor.call(calls, FIELDS).await?;
        cursor.mark();
        cursor.space().await;
        if !cursor.follows(";").await && !cursor.follows(",").await {
            return Err(Malformed);
        }
    }
}

/// A JSON array of calls.
pub(super) async fn array(cursor: &mut Cursor, calls: &mut Calls, fields: Fields) -> Result<(), Malformed> {
    cursor.expect("[").await?;
    loop {
        cursor.space().await;
        cursor.call(calls, fields).await?;
        cursor.mark();
        cursor.space().await;
        if !cursor.follows(",").await {
            return cursor.expect("]").await;
        }
    }
}

/// `{"name": .., "arguments": {..}}</tool_call>`
async fn hermes(cursor: &mut Cursor, calls: &mut Calls) -> Result<(), Malformed> {
    loop {
        cursor.space().await;
        cursor.call(calls, FIELDS).await?;
        cursor.mark();
        cursor.space().await;
        if cursor.follows("</tool_call>").await {
            return Ok(());
        }
    }
}

/// `<function=name><parameter=key>value</parameter>..</function></tool_call>`; a value stands on lines of its own.
async fn function(cursor: &mut Cursor, calls: &mut Calls) -> Result<(), Malformed> {
    loop {
        cursor.space().await;
        cursor.expect("<function=").await?;
        let (tool, _) = cursor.until(&[">"], NAME).await?;
        let tool = name(&tool)?;
        let mut arguments = Arguments::new(tool, calls.begin(cursor, tool, None)?);
        cursor.mark();
        let well = async {
            loop {
                cursor.space().await;
                if cursor.follows("</function>").await {
                    return Ok::<(), Malformed>(());
                }
                cursor.expect("<parameter=").await?;
                let (key, _) = cursor.until(&[">"], NAME).await?;
                let (value, _) = cursor.until(&["</parameter>"], PARAMETER).await?;
                let value = value.strip_prefix('\n').unwrap_or(&value);
                let value = value.strip_suffix('\n').unwrap_or(value);
                arguments.parameter(cursor, calls, key.trim(), value, Kind::Unsaid);
            }
        }
        .await;
        arguments.close(cursor);
        well?;
        cursor.mark();
        cursor.space().await;
        if cursor.follows("</tool_call>").await {
            return Ok(());
        }
    }
}

/// `name<arg_key>key</arg_key><arg_value>value</arg_value>..</tool_call>`
async fn pairs(cursor: &mut Cursor, calls: &mut Calls) -> Result<(), Malformed> {
    let (tool, mut end) = cursor.until(&["<arg_key>", "</tool_call>"], NAME).await?;
    let tool = name(&tool)?;
    let mut arguments = Arguments::new(tool, calls.begin(cursor, tool, None)?);
    cursor.mark();
    let well = async {
        while end == 0 {
            let (key, _) = cursor.until(&["</arg_key>"], NAME).await?;
            cursor.space().await;
            cursor.expect("<arg_value>").await?;
            let (value, _) = cursor.until(&["</arg_value>"], PARAMETER).await?;
            arguments.parameter(cursor, calls, key.trim(), &value, Kind::Unsaid);
            cursor.space().await;
            if !cursor.follows("<arg_key>").await {
                cursor.expect("</tool_call>").await?;
                end = 1;
            }
        }
        Ok::<(), Malformed>(())
    }
    .await;
    arguments.close(cursor);
    well
}

/// An array of objects, one object, or (since tokenizer v11) `name[CALL_ID]id[ARGS]{..}`, of which ids and `[ARGS]` may
/// be missing.
async fn mistral(cursor: &mut Cursor, calls: &mut Calls) -> Result<(), Malformed> {
    cursor.space().await;
    match cursor.peek().await {
        Some('[') => array(cursor, calls, FIELDS).await,
        Some('{') => cursor.call(calls, FIELDS).await,
        _ => {
            let (tool, end) = cursor.until(&["[ARGS]", "[CALL_ID]", "{"], NAME).await?;
            let tool = name(&tool)?;
            let mut id = None;
            match end {
                1 => id = Some(cursor.until(&["[ARGS]"], NAME).await?.0),
                2 => cursor.put_back("{"),
                _ => {}
            }
            cursor.space().await;
            let index = calls.begin(cursor, tool, id.as_deref().map(str::trim).filter(|id| !id.is_empty()))?;
            cursor.arguments(index).await
        }
    }
}

/// V3.1: `name<sep>{..}`; V3 and R1: `function<sep>name`, and the arguments in a fence of JSON.
async fn deepseek(cursor: &mut Cursor, calls: &mut Calls) -> Result<(), Malformed> {
    loop {
        cursor.space().await;
        if cursor.follows("<｜tool▁calls▁end｜>").await {
            return Ok(());
        }
        cursor.expect("<｜tool▁call▁begin｜>").await?;
        let (mut tool, _) = cursor.until(&["<｜tool▁sep｜>"], NAME).await?;
        cursor.space().await;
        if cursor.peek().await != Some('{') {
            tool = cursor.until(&["\n"], NAME).await?.0;
            cursor.space().await;
            cursor.expect("```json").await?;
            cursor.space().await;
        }
        let index = calls.begin(cursor, name(&tool)?, None)?;
        cursor.arguments(index).await?;
        cursor.mark();
        cursor.space().await;
        if cursor.follows("```").await {
            cursor.space().await;
        }
        cursor.expect("<｜tool▁call▁end｜>").await?;
        cursor.mark();
    }
}

/// `functions.name:0<|tool_call_argument_begin|>{..}`; what stands before the arguments is the call's id.
async fn kimi(cursor: &mut Cursor, calls: &mut Calls) -> Result<(), Malformed> {
    loop {
        cursor.space().await;
        if cursor.follows("<|tool_calls_section_end|>").await {
            return Ok(());
        }
        cursor.expect("<|tool_call_begin|>").await?;
        let (id, _) = cursor.until(&["<|tool_call_argument_begin|>"], NAME).await?;
        let id = name(&id)?;
        let tool = id.strip_prefix("functions.").unwrap_or(id);
        let tool = tool.rsplit_once(':').map_or(tool, |(tool, _)| tool);
        cursor.space().await;
        let index = calls.begin(cursor, tool, Some(id))?;
        cursor.arguments(index).await?;
        cursor.mark();
        cursor.space().await;
        cursor.expect("<|tool_call_end|>").await?;
        cursor.mark();
    }
}

/// The second and third mark only frame the answer.
async fn cohere(cursor: &mut Cursor, calls: &mut Calls, mark: usize) -> Result<(), Malformed> {
    const COHERE: Fields = Fields { name: &["tool_name"], arguments: &["parameters"] };
    if mark > 0 {
        return Ok(());
    }
    cursor.space().await;
    match cursor.peek().await {
        Some('[') => array(cursor, calls, COHERE).await?,
        _ => cursor.call(calls, COHERE).await?,
    }
    cursor.mark();
    cursor.space().await;
    cursor.expect("<|END_ACTION|>").await
}

/// Markup of invocations with parameters.
struct Invocations {
    /// What stands before each, up to and including the second text.
    before: Option<(&'static str, &'static str)>,
    invoke: &'static str,
    invoke_end: &'static str,
    parameter: &'static str,
    parameter_end: &'static str,
    /// What stands behind each.
    after: Option<&'static str>,
    end: &'static str,
}

const MINIMAX: Invocations = Invocations {
    before: None,
    invoke: "<invoke name=\"",
    invoke_end: "</invoke>",
    parameter: "<parameter name=\"",
    parameter_end: "</parameter>",
    after: None,
    end: "</minimax:tool_call>",
};

const DSML_32: Invocations = Invocations {
    invoke: "<｜DSML｜invoke name=\"",
    invoke_end: "</｜DSML｜invoke>",
    parameter: "<｜DSML｜parameter name=\"",
    parameter_end: "</｜DSML｜parameter>",
    end: "</｜DSML｜function_calls>",
    ..MINIMAX
};

const DSML_4: Invocations = Invocations { end: "</｜DSML｜tool_calls>", ..DSML_32 };

const STEP3: Invocations = Invocations {
    before: Some(("<｜tool_call_begin｜>", "<｜tool_sep｜>")),
    invoke: "<steptml:invoke name=\"",
    invoke_end: "</steptml:invoke>",
    parameter: "<steptml:parameter name=\"",
    parameter_end: "</steptml:parameter>",
    after: Some("<｜tool_call_end｜>"),
    end: "<｜tool_calls_end｜>",
};

/// Invocations in a row. An attribute `string="true"` or `"false"` (DeepSeek) says what a parameter is.
async fn invocations(cursor: &mut Cursor, calls: &mut Calls, markup: &Invocations) -> Result<(), Malformed> {
    loop {
        cursor.space().await;
        if cursor.follows(markup.end).await {
            return Ok(());
        }
        if let Some((begin, end)) = markup.before {
            cursor.expect(begin).await?;
            cursor.until(&[end], NAME).await?;
            cursor.space().await;
        }
        cursor.expect(markup.invoke).await?;
        let (tool, _) = cursor.until(&["\""], NAME).await?;
        cursor.until(&[">"], NAME).await?;
        let mut arguments = Arguments::new(&tool, calls.begin(cursor, &tool, None)?);
        cursor.mark();
        let well = parameters(cursor, calls, markup, &mut arguments).await;
        arguments.close(cursor);
        well?;
        cursor.mark();
        if let Some(after) = markup.after {
            cursor.space().await;
            cursor.expect(after).await?;
            cursor.mark();
        }
    }
}

async fn parameters(
    cursor: &mut Cursor,
    calls: &Calls,
    markup: &Invocations,
    arguments: &mut Arguments,
) -> Result<(), Malformed> {
    loop {
        cursor.space().await;
        if cursor.follows(markup.invoke_end).await {
            return Ok(());
        }
        cursor.expect(markup.parameter).await?;
        let (key, _) = cursor.until(&["\""], NAME).await?;
        let (attributes, _) = cursor.until(&[">"], NAME).await?;
        let (value, _) = cursor.until(&[markup.parameter_end], PARAMETER).await?;
        let kind = match attributes.trim() {
            "string=\"true\"" => Kind::Text,
            "string=\"false\"" => Kind::Json,
            _ => Kind::Unsaid,
        };
        arguments.parameter(cursor, calls, &key, &value, kind);
    }
}
