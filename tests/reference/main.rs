//! Every row of the documented tables names the tests that hold it, and those tests exist.
//!
//! The tables are those of the documented system (SMG PD docs, configuration and metrics references). A test that is renamed or removed
//! takes its row with it, or this fails; so does a flag or metric without a row.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod codes;
mod flags;
mod metrics;
mod protocols;
mod routing;

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
        let By(tests) = held;
        let texts: String = tests.iter().map(|(file, _)| read(file)).collect();
        for flag in names(row) {
            assert!(rowed.insert(flag), "{flag} has two rows");
            // Some are used by every test, through what these share, or are spelled in a list.
            let used = texts.contains(&format!("--{flag}")) || texts.contains(flag);
            assert!(used, "none of the tests of {row} uses --{flag}");
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
        let By(tests) = held;
        let texts: String = tests.iter().map(|(file, _)| read(file)).collect();
        for name in names(row) {
            assert!(rowed.insert(name), "{name} has two rows");
            assert!(page.contains(&format!("`{name}`")), "docs/reference/metrics.md has no {name}");
            assert!(texts.contains(name), "no test of {row} looks at {name}");
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

/// The codes in the first table of the API reference.
fn codes_of_the_reference(page: &str) -> Vec<String> {
    let rows = page.lines().skip_while(|line| !line.starts_with("| status | code")).skip(2);
    let rows = rows.take_while(|line| line.starts_with('|'));
    let codes = rows.filter_map(|row| row.split('|').nth(2));
    codes.flat_map(|cell| cell.split('`').skip(1).step_by(2)).map(str::to_owned).collect()
}

#[test]
fn every_error_code_of_the_reference_is_provoked_by_a_test_and_every_code_of_the_gateway_is_in_it() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let page = std::fs::read_to_string(root.join("docs/reference/api.md")).unwrap();
    let tests: String = ["tests", "tests/grpc", "dataplane/engines/tests", "dataplane/gateway/tests"]
        .iter()
        .filter_map(|folder| std::fs::read_dir(root.join(folder)).ok())
        .flatten()
        .map(|entry| entry.unwrap().path())
        .chain([root.join("dataplane/gateway/src/grpc/flow_tests.rs")])
        .filter_map(|path| std::fs::read_to_string(path).ok())
        .collect();
    let codes = codes_of_the_reference(&page);
    assert!(codes.len() > 20, "{codes:?}");
    // The page abbreviates families of codes.
    for code in codes.iter().filter(|code| !code.starts_with('_')) {
        let literal = tests.contains(&format!("\"{code}\""));
        let header = tests.contains(&format!("x-smg-error-code: {code}\""));
        assert!(literal || header, "no test provokes {code}");
    }
    let source = std::fs::read_to_string(root.join("dataplane/gateway/src/front/error.rs")).unwrap();
    let of_the_gateway = source.split("pub fn code(").nth(1).unwrap().split("pub fn ").next().unwrap();
    let arms = of_the_gateway.lines().filter_map(|line| line.split_once("=> \"")?.1.split('"').next());
    for code in arms {
        assert!(page.contains(&format!("`{code}`")), "docs/reference/api.md says nothing of {code}");
    }
}
