//! Medians, ratios, and the table.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::time::Duration;

/// Columns whose ratio says nothing: what was added to another latency may be nothing, or less; the others tell of the measurement.
const WITHOUT_RATIO: [&str; 3] = ["added p50 us", "late p99 us", "open streams"];

/// One measurement: figures by name, in the order of the columns.
pub type Figures = Vec<(&'static str, f64)>;

/// The value at `share` (0 to 1) of unsorted durations, in microseconds.
pub fn percentile(durations: &[Duration], share: f64) -> f64 {
    let mut sorted = durations.to_vec();
    sorted.sort_unstable();
    let index = ((sorted.len() as f64 * share) as usize).min(sorted.len().saturating_sub(1));
    sorted.get(index).map_or(f64::NAN, |duration| duration.as_secs_f64() * 1e6)
}

/// The measurements of one workload.
pub struct Rows {
    name: &'static str,
    description: String,
    order: Vec<String>,
    figures: BTreeMap<String, Vec<Figures>>,
    /// For each row the row that its ratios are to.
    bases: BTreeMap<String, Option<String>>,
}

impl Rows {
    /// No measurement yet.
    pub fn new(name: &'static str, description: String) -> Self {
        Self { name, description, order: Vec::new(), figures: BTreeMap::new(), bases: BTreeMap::new() }
    }

    /// Adds a repetition of a subject, whose ratios are to `base`.
    pub fn add(&mut self, subject: &str, base: Option<String>, figures: Figures) {
        if !self.figures.contains_key(subject) {
            self.order.push(subject.to_owned());
            self.bases.insert(subject.to_owned(), base);
        }
        self.figures.entry(subject.to_owned()).or_default().push(figures);
    }

    /// A table: medians over the repetitions; in brackets the ratio to the row's base.
    pub fn render(&self) -> String {
        let columns: Vec<&str> = self
            .order
            .first()
            .and_then(|name| self.figures.get(name)?.first())
            .map(|figures| figures.iter().map(|(name, _)| *name).collect())
            .unwrap_or_default();
        let mut text = format!("\n## {}: {}\n\n| subject |", self.name, self.description);
        for column in &columns {
            let _ = write!(text, " {column} |");
        }
        text.push_str("\n|---|");
        columns.iter().for_each(|_| text.push_str("---:|"));
        for name in &self.order {
            let _ = write!(text, "\n| {name} |");
            let base = self.bases.get(name).and_then(Option::as_ref).filter(|base| *base != name);
            for column in &columns {
                let value = self.median(name, column);
                let reference = base.map(|base| self.median(base, column)).filter(|value| *value > 0.0);
                let ratio = reference
                    .filter(|_| !WITHOUT_RATIO.contains(column) && !value.is_nan())
                    .map(|reference| format!(" ({:.2}x)", value / reference));
                let _ = write!(text, " {}{} |", show(value), ratio.unwrap_or_default());
            }
        }
        text
    }

    fn median(&self, subject: &str, column: &str) -> f64 {
        let mut values: Vec<f64> = self
            .figures
            .get(subject)
            .into_iter()
            .flatten()
            .filter_map(|figures| figures.iter().find(|(name, _)| *name == column).map(|(_, value)| *value))
            .collect();
        values.sort_by(f64::total_cmp);
        median(&values)
    }
}

/// The middle of sorted values, or the mean of the two in the middle.
fn median(sorted: &[f64]) -> f64 {
    let (below, above) = (sorted.len().saturating_sub(1) / 2, sorted.len() / 2);
    sorted.get(below).zip(sorted.get(above)).map_or(f64::NAN, |(below, above)| (below + above) / 2.0)
}

fn show(value: f64) -> String {
    match value {
        value if value.is_nan() => "-".to_owned(),
        value if value.abs() >= 1000.0 => format!("{value:.0}"),
        value if value.abs() >= 10.0 => format!("{value:.1}"),
        value => format!("{value:.2}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_of_an_even_number_lies_between_the_two_in_the_middle() {
        assert_eq!(median(&[1.0, 2.0, 9.0]), 2.0);
        assert_eq!(median(&[1.0, 2.0, 4.0, 9.0]), 3.0);
        assert_eq!(median(&[5.0]), 5.0);
        assert!(median(&[]).is_nan());
    }
}
