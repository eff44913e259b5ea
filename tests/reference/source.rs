//! What a test says, read from its source: its own text and that of what it uses.
//!
//! A whole file proves nothing about one test in it, and a name that stands in a list or a comment is used by nobody. So a test is read with
//! the helpers and constants of its file that it names, and with those that all integration tests share; nothing else counts.

use std::collections::{BTreeMap, BTreeSet};

use super::read;

/// Shared by integration tests.
const SHARED: [&str; 3] = ["tests/support/mod.rs", "tests/support/fleet.rs", "tests/support/refusals.rs"];
/// A list of every flag uses none.
const LISTS: [&str; 1] = ["DOCUMENTED_FLAGS"];
/// How far helpers of helpers are followed.
const DEPTH: usize = 4;

/// The functions and constants of a file by name, each with its text.
fn items(text: &str) -> BTreeMap<String, String> {
    let lines: Vec<&str> = text.lines().collect();
    let mut items: BTreeMap<String, String> = BTreeMap::new();
    for (at, line) in lines.iter().enumerate() {
        let code = line.trim_start();
        let indent = &line[..line.len() - code.len()];
        let words: Vec<&str> = code.split(|c: char| !(c.is_alphanumeric() || c == '_')).collect();
        let Some(keyword) = words.iter().position(|word| ["fn", "const", "static", "def"].contains(word)) else {
            continue;
        };
        let before = words[..keyword].iter().all(|word| ["pub", "async", "crate", "super", ""].contains(word));
        let Some(name) = words.get(keyword + 1).filter(|name| before && !name.is_empty()) else { continue };
        let rest = &lines[at..];
        let length = match words[keyword] {
            "fn" if line.ends_with('}') => 1,
            "fn" => rest.iter().position(|line| *line == format!("{indent}}}")).map_or(rest.len(), |end| end + 1),
            "def" => {
                let inside = |line: &&str| line.is_empty() || line.starts_with(&format!("{indent} "));
                1 + rest[1..].iter().take_while(|line| inside(line)).count()
            }
            _ => rest.iter().position(|line| line.ends_with(';')).map_or(rest.len(), |end| end + 1),
        };
        let text = items.entry((*name).to_owned()).or_default();
        text.push_str(&rest[..length].join("\n"));
        text.push('\n');
    }
    items
}

/// Without what only explains it.
fn without_comments(text: &str) -> String {
    let is_code = |line: &&str| !line.trim_start().starts_with("//") && !line.trim_start().starts_with('#');
    text.lines().filter(is_code).collect::<Vec<_>>().join("\n")
}

/// The text of a test with that of all that it uses; empty where there is no such test.
pub fn of_test(file: &str, test: &str) -> String {
    let mut known: BTreeMap<String, String> = BTreeMap::new();
    if file.starts_with("tests/") {
        known.extend(SHARED.map(read).iter().flat_map(|text| items(text)));
        // A test of several files shares what its first one has.
        let first = file.rsplit_once('/').map(|(folder, _)| read(&format!("{folder}/main.rs")));
        known.extend(items(&first.unwrap_or_default()));
    }
    known.extend(items(&read(file)));
    let (mut text, mut seen, mut wanted) = (String::new(), BTreeSet::new(), vec![test.to_owned()]);
    for _ in 0..DEPTH {
        let mut next = Vec::new();
        for name in wanted {
            let Some(item) = known.get(&name).filter(|_| !LISTS.contains(&name.as_str()) && seen.insert(name.clone()))
            else {
                continue;
            };
            let item = without_comments(item);
            let words = item.split(|c: char| !(c.is_alphanumeric() || c == '_'));
            next.extend(words.filter(|word| known.contains_key(*word)).map(str::to_owned));
            text.push_str(&item);
            text.push('\n');
        }
        wanted = next;
    }
    text
}

/// Whether `text` has this word, with nothing that would make it a longer one.
pub fn has_word(text: &str, word: &str) -> bool {
    let is_part = |c: char| c.is_alphanumeric() || c == '-' || c == '_';
    text.match_indices(word).any(|(at, _)| {
        let (before, after) = (text[..at].chars().next_back(), text[at + word.len()..].chars().next());
        !before.is_some_and(|c| is_part(c) && !word.starts_with('-')) && !after.is_some_and(is_part)
    })
}

#[test]
fn a_test_is_read_with_what_it_uses_and_nothing_else() {
    let file = "tests/flags.rs";
    let text = of_test(file, "a_request_id_is_looked_for_in_the_headers_that_were_named");
    assert!(has_word(&text, "--request-id-headers"));
    assert!(!has_word(&text, "--request-id") && !has_word(&text, "--sse-keepalive-secs"), "{text}");
    assert!(has_word(
        &of_test("src/cli/tests.rs", "every_documented_http_start_command_parses_as_written"),
        "--prefill"
    ));
    let listed = of_test("src/cli/tests.rs", "every_documented_flag_is_understood");
    assert!(!listed.is_empty() && !listed.contains("stream-body-stall-timeout-secs"), "{listed}");
    assert!(of_test(file, "no_such_test").is_empty());
}
