//! The metrics of many engines as one exposition text.
//!
//! Engines are not trusted to write it well, and a scraper refuses a page for one bad line: what is not of the text format (Prometheus,
//! "Exposition formats", version 0.0.4) is left out. Each sample gets a label that names its worker; an engine's own label of that name is
//! kept under another one, as a scraper does with labels that it sets itself (Prometheus, `honor_labels: false`). Pure.

use std::borrow::Cow;
use std::collections::HashMap;
use std::fmt::Write;

/// The label that names the worker of a sample.
const WORKER: &str = "worker_addr";
/// What goes before the name of an engine's label that is taken.
const EXPORTED: &str = "exported_";
/// Types of a family.
const TYPES: [&str; 5] = ["counter", "gauge", "histogram", "summary", "untyped"];
/// What the names of a family's samples may end in besides its own name.
const SUFFIXES: [&str; 6] = ["_bucket", "_sum", "_count", "_total", "_created", "_info"];

/// A sample as its line has it.
#[derive(Debug)]
struct Sample<'a> {
    name: &'a str,
    /// Names, and values as they are escaped.
    labels: Vec<(&'a str, &'a str)>,
    /// The value and, if there is one, the time.
    rest: &'a str,
}

/// The lines of a family.
#[derive(Debug, Default)]
struct Family<'a> {
    help: Option<&'a str>,
    kind: Option<&'a str>,
    samples: String,
}

/// One text from those of several workers, each named by the first of the two: all lines of a family stand together under one head, as the
/// format demands.
pub(super) fn merge(texts: &[(String, String)]) -> String {
    let mut order: Vec<&str> = Vec::new();
    let mut families: HashMap<&str, Family<'_>> = HashMap::new();
    for (worker, text) in texts {
        let worker = worker.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n");
        let mut current = "";
        for line in text.lines() {
            let head = line.strip_prefix("# ").and_then(Head::parse);
            let sample = if head.is_none() { Sample::parse(line) } else { None };
            current = match (&head, &sample) {
                (Some(head), _) => head.family,
                (None, Some(sample)) if sample.is_of(current) => current,
                (None, Some(sample)) => sample.name,
                (None, None) => continue,
            };
            let family = families.entry(current).or_insert_with(|| {
                order.push(current);
                Family::default()
            });
            match head {
                // Engines of two versions may describe a family differently: the first description stands.
                Some(Head { is_type: true, .. }) => family.kind = family.kind.or(Some(line)),
                Some(Head { is_type: false, .. }) => family.help = family.help.or(Some(line)),
                None => sample.iter().for_each(|sample| sample.write(&worker, &mut family.samples)),
            }
        }
    }
    let mut merged = String::new();
    for family in order.iter().filter_map(|name| families.get(name)) {
        for line in family.help.iter().chain(&family.kind) {
            merged.push_str(line);
            merged.push('\n');
        }
        merged.push_str(&family.samples);
    }
    merged
}

/// A line that describes a family.
struct Head<'a> {
    family: &'a str,
    is_type: bool,
}

impl<'a> Head<'a> {
    /// Of what stands after `# `; `None` for a comment and for what describes nothing.
    fn parse(line: &'a str) -> Option<Self> {
        let (keyword, line) = line.split_once(' ')?;
        let (family, said) = line.split_once(' ').unwrap_or((line, ""));
        let valid = match keyword {
            "HELP" => true,
            "TYPE" => TYPES.contains(&said),
            _ => false,
        };
        (valid && is_name(family, true)).then_some(Self { family, is_type: keyword == "TYPE" })
    }
}

impl<'a> Sample<'a> {
    /// `name{label="value",…} value [time]`; `None` when the line is not one.
    fn parse(line: &'a str) -> Option<Self> {
        let line = line.trim_matches(BLANKS);
        let end = line.find(|c| c == '{' || BLANKS.contains(&c))?;
        let (name, rest) = line.split_at(end);
        let (labels, rest) = match rest.trim_start_matches(BLANKS).strip_prefix('{') {
            Some(rest) => parse_labels(rest)?,
            None => (Vec::new(), rest),
        };
        let rest = rest.trim_matches(BLANKS);
        let mut numbers = rest.split(BLANKS).filter(|number| !number.is_empty());
        let value = numbers.next().is_some_and(|value| value.parse::<f64>().is_ok());
        let time = numbers.next().is_none_or(|time| time.parse::<i64>().is_ok());
        let whole = numbers.next().is_none();
        (is_name(name, true) && value && time && whole).then_some(Self { name, labels, rest })
    }

    fn is_of(&self, family: &str) -> bool {
        let suffix = self.name.strip_prefix(family).filter(|_| !family.is_empty());
        suffix.is_some_and(|suffix| suffix.is_empty() || SUFFIXES.contains(&suffix))
    }

    /// The line of this sample of `worker`, which is escaped.
    fn write(&self, worker: &str, text: &mut String) {
        let has = |name: &str| self.labels.iter().any(|(known, _)| *known == name);
        // Writing to a string does not fail.
        let _ = write!(text, "{}{{{WORKER}=\"{worker}\"", self.name);
        for (name, value) in &self.labels {
            let mut shown = Cow::Borrowed(*name);
            if shown == WORKER {
                shown = Cow::Owned(format!("{EXPORTED}{shown}"));
                while has(&shown) {
                    shown = Cow::Owned(format!("{EXPORTED}{shown}"));
                }
            }
            let _ = write!(text, ",{shown}=\"{value}\"");
        }
        let _ = writeln!(text, "}} {}", self.rest);
    }
}

/// What may stand between two parts of a line.
const BLANKS: [char; 2] = [' ', '\t'];

/// The labels up to the brace that closes them, and what follows it. `None` when they are not well formed, or one comes twice.
fn parse_labels(mut rest: &str) -> Option<(Vec<(&str, &str)>, &str)> {
    let mut labels: Vec<(&str, &str)> = Vec::new();
    loop {
        rest = rest.trim_start_matches(BLANKS);
        if let Some(after) = rest.strip_prefix('}') {
            return Some((labels, after));
        }
        let (name, after) = rest.split_once('=')?;
        let name = name.trim_end_matches(BLANKS);
        let after = after.trim_start_matches(BLANKS).strip_prefix('"')?;
        let end = end_of_value(after)?;
        if !is_name(name, false) || labels.iter().any(|(known, _)| *known == name) {
            return None;
        }
        labels.push((name, &after[..end]));
        rest = after[end + 1..].trim_start_matches(BLANKS);
        match rest.strip_prefix(',') {
            Some(after) => rest = after,
            None if rest.starts_with('}') => {}
            None => return None,
        }
    }
}

/// Where the quote is that ends a label's value. `None` when there is none, or something is escaped that cannot be.
fn end_of_value(text: &str) -> Option<usize> {
    let mut bytes = text.bytes().enumerate();
    loop {
        match bytes.next()? {
            (at, b'"') => return Some(at),
            (_, b'\\') => {
                bytes.next().filter(|(_, escaped)| matches!(escaped, b'\\' | b'"' | b'n'))?;
            }
            _ => {}
        }
    }
}

/// Whether it can be the name of a metric, or else of a label.
fn is_name(name: &str, metric: bool) -> bool {
    let fits = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_' || (metric && byte == b':');
    name.bytes().all(fits) && name.bytes().next().is_some_and(|first| !first.is_ascii_digit())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn merged(texts: &[(&str, &str)]) -> String {
        merge(&texts.iter().map(|(worker, text)| ((*worker).to_owned(), (*text).to_owned())).collect::<Vec<_>>())
    }

    #[test]
    fn every_sample_names_its_worker_and_families_stand_together() {
        let one = "# HELP a Help.\n# TYPE a counter\na{x=\"1\"} 2\na 3\nb{} 4\n";
        let other = "# HELP a Other help.\n# TYPE a counter\na{x=\"1\"} 5\n";
        let expected = "# HELP a Help.\n# TYPE a counter\na{worker_addr=\"http://p:1\",x=\"1\"} 2\n\
                        a{worker_addr=\"http://p:1\"} 3\na{worker_addr=\"http://d:1\",x=\"1\"} 5\n\
                        b{worker_addr=\"http://p:1\"} 4\n";
        assert_eq!(merged(&[("http://p:1", one), ("http://d:1", other)]), expected);
    }

    #[test]
    fn the_parts_of_a_histogram_stay_under_its_head_and_a_longer_name_is_another_family() {
        let text = "# TYPE a histogram\na_bucket{le=\"+Inf\"} 1\nab 7\na_sum 0.5\na_count 1\n";
        let expected = "# TYPE a histogram\na_bucket{worker_addr=\"w\",le=\"+Inf\"} 1\nab{worker_addr=\"w\"} 7\n\
                        a_sum{worker_addr=\"w\"} 0.5\na_count{worker_addr=\"w\"} 1\n";
        assert_eq!(merged(&[("w", text)]), expected);
    }

    #[test]
    fn an_engines_own_label_of_that_name_is_kept_under_another() {
        for (line, expected) in [
            ("x{worker_addr=\"forged\"} 1", "x{worker_addr=\"w\",exported_worker_addr=\"forged\"} 1\n"),
            (
                "x{exported_worker_addr=\"a\",worker_addr=\"b\"} 1",
                "x{worker_addr=\"w\",exported_worker_addr=\"a\",exported_exported_worker_addr=\"b\"} 1\n",
            ),
        ] {
            assert_eq!(merged(&[("w", line)]), expected);
        }
    }

    #[test]
    fn what_can_be_read_is_written_in_one_way() {
        for (line, expected) in [
            ("a 1", "a{worker_addr=\"w\"} 1"),
            ("  a\t1 ", "a{worker_addr=\"w\"} 1"),
            ("a{} 1 1700000000000", "a{worker_addr=\"w\"} 1 1700000000000"),
            ("a { b = \"1\" , } NaN", "a{worker_addr=\"w\",b=\"1\"} NaN"),
            ("a:b{c=\"}, \\\"\\\\\\n\"} -Inf", "a:b{worker_addr=\"w\",c=\"}, \\\"\\\\\\n\"} -Inf"),
            ("a{b=\"\u{e4}\"} 1e-3", "a{worker_addr=\"w\",b=\"\u{e4}\"} 1e-3"),
        ] {
            assert_eq!(merged(&[("w", line)]), format!("{expected}\n"), "{line}");
        }
    }

    #[test]
    fn lines_that_are_not_of_the_format_are_left_out() {
        for line in [
            "y{ 3",
            "z NaN extra",
            "\u{e4}{a=\"b\"} 1",
            "foo{a=\"1} 2",
            "a",
            "a{b=\"1\"}",
            "a{b=\"1\"} one",
            "a{b=1} 1",
            "a{b=\"1\" c=\"2\"} 1",
            "a{b=\"1\",b=\"2\"} 1",
            "a{,} 1",
            "a{b=\"\\x\"} 1",
            "a{b:c=\"1\"} 1",
            "1a 1",
            "a 1 1.5",
            "a 1 2 3",
            "# TYPE a nonsense",
            "# TYPE 1a counter",
            "# a comment",
            "#",
            "",
        ] {
            assert_eq!(merged(&[("w", line)]), "", "{line}");
        }
    }
}
