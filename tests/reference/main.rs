//! Every row of the documented tables names the tests that hold it, and those tests exist.
//!
//! The tables are those of the documented system (SMG PD docs, configuration and metrics references). A test that is renamed or removed
//! takes its row with it, or this fails; so does a flag, metric or error code without a row, and a row whose tests say nothing of it.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod codes;
mod flags;
mod metrics;
mod protocols;
mod routing;
mod source;

use std::collections::BTreeSet;
use std::path::Path;

/// Where a row is held.
pub enum Held {
    /// By these tests, each a file and a name.
    By(&'static [(&'static str, &'static str)]),
}

pub use Held::By;

/// One table: its heading, and its rows.
pub type Table = (&'static str, &'static [(&'static str, Held)]);

fn tables() -> impl Iterator<Item = &'static Table> {
    [protocols::TABLES, routing::TABLES, codes::TABLES, flags::TABLES, metrics::TABLES].into_iter().flatten()
}

fn read(file: &str) -> String {
    std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join(file)).unwrap_or_default()
}

/// What a row names, one by one.
fn names(row: &'static str) -> impl Iterator<Item = &'static str> {
    row.split(", ")
}

/// What the tests of a row say, each with what it uses.
fn text_of(held: &Held) -> String {
    let By(tests) = held;
    tests.iter().map(|(file, test)| source::of_test(file, test)).collect()
}

#[test]
fn every_documented_row_names_tests_that_exist() {
    for (table, rows) in tables() {
        for (row, held) in *rows {
            let By(tests) = held;
            assert!(!tests.is_empty(), "{table}: {row}");
            for (file, test) in *tests {
                let text = read(file);
                let defined = ["fn ", "def "].iter().any(|keyword| text.contains(&format!("{keyword}{test}(")));
                assert!(defined, "{table}: {row}: {file} has no {test}");
            }
        }
    }
}

#[test]
fn every_documented_flag_has_a_row_whose_tests_use_it_or_is_absent() {
    let listed = read("src/cli/tests.rs");
    let listed = listed.split("DOCUMENTED_FLAGS: &str = \"").nth(1).unwrap().split('"').next().unwrap();
    let documented: BTreeSet<&str> = listed.split_whitespace().filter(|word| *word != "\\").collect();
    let absent = read("src/cli/absent.rs");
    let absent: BTreeSet<&str> =
        absent.split('"').skip(1).step_by(2).filter(|flag| documented.contains(flag)).collect();
    let mut rowed = BTreeSet::new();
    for (row, held) in flags::TABLES.iter().flat_map(|(_, rows)| *rows) {
        let text = text_of(held);
        for flag in names(row) {
            assert!(rowed.insert(flag), "{flag} has two rows");
            assert!(source::has_word(&text, &format!("--{flag}")), "none of the tests of {row} uses --{flag}");
        }
    }
    let both: Vec<_> = rowed.intersection(&absent).collect();
    assert!(both.is_empty(), "{both:?} refuse the start and have a row");
    let without: Vec<_> = documented.iter().filter(|flag| !rowed.contains(*flag) && !absent.contains(*flag)).collect();
    assert!(without.is_empty(), "{without:?} have no row");
    assert!(rowed.iter().all(|flag| documented.contains(flag)), "{rowed:?}");
}

#[test]
fn every_metric_of_a_row_is_exported_and_looked_at_by_its_tests() {
    let page = read("docs/reference/metrics.md");
    let mut rowed = BTreeSet::new();
    for (row, held) in metrics::TABLES.iter().flat_map(|(_, rows)| *rows).filter(|(row, _)| row.starts_with("smg_")) {
        let text = text_of(held);
        for name in names(row) {
            assert!(rowed.insert(name), "{name} has two rows");
            assert!(page.contains(&format!("`{name}`")), "docs/reference/metrics.md has no {name}");
            // A histogram is looked at by its count.
            let looked_at =
                ["", "_count", "_sum", "_bucket"].iter().any(|end| source::has_word(&text, &format!("{name}{end}")));
            assert!(looked_at, "no test of {row} looks at {name}");
        }
    }
    // Whatever tests of metrics call documented has a row here.
    let listed = read("tests/metrics.rs");
    let listed = listed.split("const WITHOUT_MEANING").next().unwrap();
    for name in
        listed.split("(\"").skip(1).filter_map(|rest| rest.split('"').next()).filter(|name| name.starts_with("smg_"))
    {
        assert!(rowed.contains(name), "{name} has no row");
    }
}

/// The codes in all tables of the API reference: those of the table of codes, and elsewhere what stands behind a status.
fn codes_of_the_reference(page: &str) -> BTreeSet<&str> {
    let mut codes = BTreeSet::new();
    let mut heading = None;
    for line in page.lines() {
        if !line.starts_with('|') {
            heading = None;
            continue;
        }
        let heading = *heading.get_or_insert(line);
        if heading.starts_with("| status | code") {
            let cell = line.split('|').nth(2).unwrap_or_default();
            codes.extend(cell.split('`').skip(1).step_by(2));
            continue;
        }
        for (at, _) in line.match_indices(" `") {
            let status = line[..at].rsplit(' ').next().unwrap_or_default().trim_start_matches('(');
            if !(status.len() == 3 && status.starts_with(['4', '5']) && status.parse::<u16>().is_ok()) {
                continue;
            }
            let listed = line[at + 1..].split(", ").map_while(|word| word.strip_prefix('`')?.split('`').next());
            codes.extend(listed);
        }
    }
    // The page abbreviates families of codes.
    codes.retain(|code| !code.starts_with('_') && code.chars().all(|c| c.is_ascii_alphabetic() || c == '_'));
    codes
}

/// Whether a test's text names a code: as a whole, or put together from a leg and the rest.
fn names_code(text: &str, code: &str) -> bool {
    let composed = code.split_once('_').is_some_and(|(leg, rest)| {
        let legs = [format!("{leg}_{{"), "{leg}_{".to_owned()];
        text.contains(&format!("\"{rest}\"")) && legs.iter().any(|leg| text.contains(leg))
    });
    composed || [format!("\"{code}\""), format!(": {code}\"")].iter().any(|spelled| text.contains(spelled))
}

#[test]
fn every_error_code_of_the_reference_is_provoked_by_a_test_and_every_code_of_the_gateway_is_in_it() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let page = std::fs::read_to_string(root.join("docs/reference/api.md")).unwrap();
    let codes = codes_of_the_reference(&page);
    for found in ["no_available_workers", "health_generate_failed", "LAST_ADMIN_TOKEN", "WORKER_CREATE_IN_PROGRESS"] {
        assert!(codes.contains(found), "{codes:?}");
    }
    let mut rowed = BTreeSet::new();
    for (row, held) in codes::TABLES.iter().flat_map(|(_, rows)| *rows) {
        let text = text_of(held);
        for code in names(row).filter(|name| !name.contains(' ')) {
            assert!(names_code(&text, code), "no test of {row} names {code}");
            rowed.insert(code);
        }
    }
    let without: Vec<_> = codes.difference(&rowed).collect();
    assert!(without.is_empty(), "{without:?} have no row");
    let source = std::fs::read_to_string(root.join("dataplane/gateway/src/front/error.rs")).unwrap();
    let of_the_gateway = source.split("pub fn code(").nth(1).unwrap().split("pub fn ").next().unwrap();
    let arms = of_the_gateway.lines().filter_map(|line| line.split_once("=> \"")?.1.split('"').next());
    for code in arms {
        assert!(page.contains(&format!("`{code}`")), "docs/reference/api.md says nothing of {code}");
    }
}
