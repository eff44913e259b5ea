//! Medians, ratios, and the table.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::time::Duration;

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
    base: Option<String>,
    order: Vec<String>,
    figures: BTreeMap<String, Vec<Figures>>,
}

impl Rows {
    /// No measurement yet. Ratios are those to `base`.
    pub fn new(name: &'static str, description: String, base: Option<String>) -> Self {
        Self { name, description, base, order: Vec::new(), figures: BTreeMap::new() }
    }

    /// Adds a repetition of a subject.
    pub fn add(&mut self, subject: &str, figures: Figures) {
        if !self.figures.contains_key(subject) {
            self.order.push(subject.to_owned());
        }
        self.figures.entry(subject.to_owned()).or_default().push(figures);
    }

    /// A table: medians over the repetitions; in brackets the ratio to the row of the base with as many workers.
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
            let base = self.base.as_ref().map(|base| {
                match name.rsplit_once(", ").filter(|_| !self.figures.contains_key(base)) {
                    Some((_, workers)) => format!("{base}, {workers}"),
                    None => base.clone(),
                }
            });
            for column in &columns {
                let value = self.median(name, column);
                let reference = base.as_deref().map(|base| self.median(base, column)).filter(|value| *value > 0.0);
                // What was added to another latency may be nothing, or less: a ratio of that says nothing.
                let ratio = reference
                    .filter(|_| !column.starts_with("added"))
                    .filter(|_| base.as_ref() != Some(name) && !value.is_nan())
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
        values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
    }
}

fn show(value: f64) -> String {
    match value {
        value if value.is_nan() => "-".to_owned(),
        value if value.abs() >= 1000.0 => format!("{value:.0}"),
        value if value.abs() >= 10.0 => format!("{value:.1}"),
        value => format!("{value:.2}"),
    }
}
