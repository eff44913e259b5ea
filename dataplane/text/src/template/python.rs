//! Values as Python writes them: printed, and by `json.dumps`; and dates by `strftime`.

use minijinja::value::ValueKind;
use minijinja::{Error, ErrorKind, Value};

/// Levels of arrays and objects that are written.
const DEPTH: usize = 128;

/// How `dumps` writes.
#[derive(Debug, Clone)]
pub(super) struct Style {
    /// Other characters than ASCII are escaped.
    pub ascii: bool,
    /// Spaces for each level, every item on a line of its own.
    pub indent: Option<usize>,
    /// Keys are sorted.
    pub sorted: bool,
    /// What stands between items.
    pub item: String,
    /// What stands between key and value.
    pub key: String,
}

/// A value as JSON text.
pub(super) fn dumps(value: &Value, style: &Style) -> Result<String, Error> {
    let mut output = String::new();
    dump(value, style, 0, &mut output)?;
    Ok(output)
}

fn dump(value: &Value, style: &Style, depth: usize, output: &mut String) -> Result<(), Error> {
    too_deep(depth)?;
    match value.kind() {
        ValueKind::None => output.push_str("null"),
        ValueKind::Bool => output.push_str(if value.is_true() { "true" } else { "false" }),
        ValueKind::Number => output.push_str(&number(value)),
        ValueKind::String => output.push_str(&string(value.as_str().unwrap_or_default(), style.ascii)),
        ValueKind::Seq | ValueKind::Iterable => {
            let items: Vec<Value> = value.try_iter()?.collect();
            listed(items, ('[', ']'), style, depth, output, |item, output| dump(&item, style, depth + 1, output))?;
        }
        ValueKind::Map => {
            let mut keys: Vec<Value> = value.try_iter()?.collect();
            if style.sorted {
                keys.sort();
            }
            listed(keys, ('{', '}'), style, depth, output, |key, output| {
                output.push_str(&string(&key.to_string(), style.ascii));
                output.push_str(&style.key);
                dump(&value.get_item(&key)?, style, depth + 1, output)
            })?;
        }
        _ => {
            return Err(Error::new(ErrorKind::InvalidOperation, format!("{} cannot be written as JSON", value.kind())));
        }
    }
    Ok(())
}

fn listed(
    items: Vec<Value>,
    brackets: (char, char),
    style: &Style,
    depth: usize,
    output: &mut String,
    mut write: impl FnMut(Value, &mut String) -> Result<(), Error>,
) -> Result<(), Error> {
    let line = |depth: usize, output: &mut String| {
        if let Some(indent) = style.indent {
            output.push('\n');
            output.extend(std::iter::repeat_n(' ', indent * depth));
        }
    };
    let empty = items.is_empty();
    output.push(brackets.0);
    for (number, item) in items.into_iter().enumerate() {
        if number > 0 {
            output.push_str(&style.item);
        }
        line(depth + 1, output);
        write(item, output)?;
    }
    if !empty {
        line(depth, output);
    }
    output.push(brackets.1);
    Ok(())
}

fn too_deep(depth: usize) -> Result<(), Error> {
    if depth < DEPTH { Ok(()) } else { Err(Error::new(ErrorKind::InvalidOperation, "a value is nested too deeply")) }
}

fn string(text: &str, ascii: bool) -> String {
    let quoted = serde_json::Value::from(text).to_string();
    if !ascii || quoted.is_ascii() {
        return quoted;
    }
    let mut output = String::new();
    for next in quoted.chars() {
        if next.is_ascii() {
            output.push(next);
        } else {
            let mut units = [0; 2];
            output.extend(next.encode_utf16(&mut units).iter().map(|unit| format!("\\u{unit:04x}")));
        }
    }
    output
}

/// A number as Python's `repr`: exponents have a sign and two digits.
fn number(value: &Value) -> String {
    if value.is_integer() {
        return value.to_string();
    }
    let Ok(float) = f64::try_from(value.clone()) else { return value.to_string() };
    let text = format!("{float:?}");
    match text.split_once('e') {
        Some((mantissa, exponent)) => {
            let (sign, digits) = exponent.strip_prefix('-').map_or(('+', exponent), |digits| ('-', digits));
            format!("{mantissa}e{sign}{digits:0>2}")
        }
        None if float.is_infinite() => text.replace("inf", "Infinity"),
        None => text,
    }
}

/// A value as Jinja2 prints it.
pub(super) fn printed(value: &Value) -> Result<String, Error> {
    match value.kind() {
        ValueKind::Undefined => Ok(String::new()),
        ValueKind::String => Ok(value.as_str().unwrap_or_default().to_owned()),
        _ => {
            let mut output = String::new();
            repr(value, 0, &mut output)?;
            Ok(output)
        }
    }
}

fn repr(value: &Value, depth: usize, output: &mut String) -> Result<(), Error> {
    too_deep(depth)?;
    match value.kind() {
        ValueKind::None => output.push_str("None"),
        ValueKind::Bool => output.push_str(if value.is_true() { "True" } else { "False" }),
        ValueKind::Number => output.push_str(&number(value)),
        ValueKind::String => output.push_str(&quoted(value.as_str().unwrap_or_default())),
        ValueKind::Seq | ValueKind::Iterable => {
            output.push('[');
            for (number, item) in value.try_iter()?.enumerate() {
                output.push_str(if number > 0 { ", " } else { "" });
                repr(&item, depth + 1, output)?;
            }
            output.push(']');
        }
        ValueKind::Map => {
            output.push('{');
            for (number, key) in value.try_iter()?.enumerate() {
                output.push_str(if number > 0 { ", " } else { "" });
                repr(&key, depth + 1, output)?;
                output.push_str(": ");
                repr(&value.get_item(&key)?, depth + 1, output)?;
            }
            output.push('}');
        }
        ValueKind::Invalid => {
            return Err(Error::new(ErrorKind::BadSerialization, value.to_string()));
        }
        _ => output.push_str(&value.to_string()),
    }
    Ok(())
}

/// A string as Python's `repr`: in single quotes unless it has such and no double ones.
fn quoted(text: &str) -> String {
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    let mut output = String::from(quote);
    for next in text.chars() {
        match next {
            '\\' => output.push_str("\\\\"),
            '\n' => output.push_str("\\n"),
            '\r' => output.push_str("\\r"),
            '\t' => output.push_str("\\t"),
            _ if next == quote => output.extend(['\\', next]),
            _ => output.push(next),
        }
    }
    output.push(quote);
    output
}

/// A date in UTC, of seconds since 1970. Directives that are not known stay as they are.
pub(super) fn strftime(seconds: i64, format: &str) -> String {
    const DAYS: [&str; 7] = ["Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"];
    const MONTHS: [&str; 12] = [
        "January",
        "February",
        "March",
        "April",
        "May",
        "June",
        "July",
        "August",
        "September",
        "October",
        "November",
        "December",
    ];
    let days = seconds.div_euclid(86_400);
    let time = seconds.rem_euclid(86_400);
    let (year, month, day) = civil(days);
    let weekday = DAYS[usize::try_from((days + 4).rem_euclid(7)).unwrap_or(0)];
    let name = MONTHS[usize::try_from(month - 1).unwrap_or(0)];
    let hour = time / 3600;
    let mut output = String::new();
    let mut characters = format.chars();
    while let Some(next) = characters.next() {
        if next != '%' {
            output.push(next);
            continue;
        }
        match characters.next() {
            Some('Y') => output.push_str(&format!("{year:04}")),
            Some('y') => output.push_str(&format!("{:02}", year.rem_euclid(100))),
            Some('m') => output.push_str(&format!("{month:02}")),
            Some('d') => output.push_str(&format!("{day:02}")),
            Some('e') => output.push_str(&format!("{day:2}")),
            Some('H') => output.push_str(&format!("{hour:02}")),
            Some('I') => output.push_str(&format!("{:02}", (hour + 11) % 12 + 1)),
            Some('p') => output.push_str(if hour < 12 { "AM" } else { "PM" }),
            Some('M') => output.push_str(&format!("{:02}", time % 3600 / 60)),
            Some('S') => output.push_str(&format!("{:02}", time % 60)),
            Some('B') => output.push_str(name),
            Some('b') => output.push_str(&name[..3]),
            Some('A') => output.push_str(weekday),
            Some('a') => output.push_str(&weekday[..3]),
            Some('j') => output.push_str(&format!("{:03}", days - first_day(year) + 1)),
            Some('F') => output.push_str(&format!("{year:04}-{month:02}-{day:02}")),
            Some('T') => output.push_str(&format!("{hour:02}:{:02}:{:02}", time % 3600 / 60, time % 60)),
            Some('Z') => output.push_str("UTC"),
            Some('z') => output.push_str("+0000"),
            Some('%') | None => output.push('%'),
            Some(other) => output.extend(['%', other]),
        }
    }
    output
}

/// The day of a year's first of January, counted from 1970's.
fn first_day(year: i64) -> i64 {
    let before = year - 1;
    before * 365 + before.div_euclid(4) - before.div_euclid(100) + before.div_euclid(400) - 719_162
}

/// Year, month and day of a day counted from 1970-01-01, in the Gregorian calendar.
fn civil(days: i64) -> (i64, i64, i64) {
    let mut year = 1970 + days.div_euclid(366);
    while first_day(year + 1) <= days {
        year += 1;
    }
    let leap = (year % 4 == 0 && year % 100 != 0) || year % 400 == 0;
    let lengths = [31, if leap { 29 } else { 28 }, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31];
    let mut day = days - first_day(year);
    for (number, length) in (1..).zip(lengths) {
        if day < length {
            return (year, number, day + 1);
        }
        day -= length;
    }
    (year, 12, 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_are_right_over_leap_years_and_before_1970() {
        let day = |seconds| strftime(seconds, "%Y-%m-%d %A %j");
        assert_eq!(day(0), "1970-01-01 Thursday 001");
        assert_eq!(day(-1), "1969-12-31 Wednesday 365");
        assert_eq!(day(951_782_400), "2000-02-29 Tuesday 060");
        assert_eq!(day(4_107_542_400), "2100-03-01 Monday 060");
        assert_eq!(strftime(45_296, "%I:%M:%S %p %% %Q"), "12:34:56 PM % %Q");
    }

    #[test]
    fn numbers_are_written_as_python_does() {
        let written = |float: f64| number(&Value::from(float));
        assert_eq!([0.1, 1.0, 1e16, 1e-5, 123456789.0].map(written), ["0.1", "1.0", "1e+16", "1e-05", "123456789.0"]);
    }
}
