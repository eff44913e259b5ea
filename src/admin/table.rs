//! Results for people: tables.

use serde_json::Value;

/// A column: its title, where its value is (dots lead into objects), and whether it is shown only where there is room.
pub type Column = (&'static str, &'static str, bool);

const WIDE: bool = true;
const ALWAYS: bool = false;

/// `smg workers`.
pub const WORKERS: &[Column] = &[
    ("ID", "id", ALWAYS),
    ("URL", "url", ALWAYS),
    ("TYPE", "worker_type", ALWAYS),
    ("RUNTIME", "runtime_type", ALWAYS),
    ("MODEL", "model_id", ALWAYS),
    ("STATUS", "status", ALWAYS),
    ("INTENT", "intent", ALWAYS),
    ("LOAD", "load", ALWAYS),
    ("PAIRING", "pd_pairing", WIDE),
    ("WIRE", "connection_mode", WIDE),
    ("PRIORITY", "priority", WIDE),
    ("COST", "cost", WIDE),
    ("ORIGIN", "origin", WIDE),
    ("REVISION", "mod_revision", WIDE),
    ("JOB", "job_status.status", WIDE),
    ("MESSAGE", "job_status.message", WIDE),
];

/// `smg policies`.
pub const POLICIES: &[Column] = &[
    ("MODEL", "model", ALWAYS),
    ("SOURCE", "source", ALWAYS),
    ("REVISION", "mod_revision", ALWAYS),
    ("DOCUMENT", "document", ALWAYS),
];

/// `smg gateways`.
pub const GATEWAYS: &[Column] = &[
    ("GATEWAY", "gateway_id", ALWAYS),
    ("CONNECTED", "connected", ALWAYS),
    ("ACKED", "acked_revision", ALWAYS),
    ("BEHIND", "behind", ALWAYS),
    ("REQUESTS", "in_flight_requests", ALWAYS),
    ("SILENT-MS", "silent_ms", ALWAYS),
    ("REFUSED", "nack.revision", ALWAYS),
    ("REASON", "nack.reason", ALWAYS),
    ("MEMBER", "member", WIDE),
    ("VERSION", "version", WIDE),
    ("PROCESS", "process_id", WIDE),
];

/// `smg admission`.
pub const ADMISSION: &[Column] = &[
    ("DECODE", "url", ALWAYS),
    ("WINDOW", "window", ALWAYS),
    ("GRANTED", "granted", ALWAYS),
    ("IN-USE", "in_use", ALWAYS),
    ("WAITING", "waiting", ALWAYS),
    ("ZOMBIE", "zombie", ALWAYS),
    ("FOREIGN", "foreign", ALWAYS),
    ("FREE", "free", ALWAYS),
    ("HOLDERS", "holders_text", WIDE),
];

/// `smg tokens`.
pub const TOKENS: &[Column] = &[
    ("ID", "id", ALWAYS),
    ("NAME", "name", ALWAYS),
    ("ROLE", "role", ALWAYS),
    ("ORIGIN", "origin", ALWAYS),
    ("CREATED", "created_at", WIDE),
    ("REVISION", "mod_revision", WIDE),
];

/// `smg tokens create`.
pub const NEW_TOKEN: &[Column] =
    &[("ID", "id", ALWAYS), ("NAME", "name", ALWAYS), ("ROLE", "role", ALWAYS), ("TOKEN", "token", ALWAYS)];

/// `smg pairing`.
pub const CELLS: &[Column] = &[
    ("MODEL", "model", ALWAYS),
    ("PREFILL", "prefill.url", ALWAYS),
    ("DECODE", "decode.url", ALWAYS),
    ("PAIRS", "pairs", ALWAYS),
    ("REASONS", "reasons_text", ALWAYS),
    ("PREFILL-KEY", "prefill.pd_pairing", WIDE),
    ("DECODE-KEY", "decode.pd_pairing", WIDE),
];

/// `smg audit`.
pub const AUDIT: &[Column] = &[
    ("REVISION", "revision", ALWAYS),
    ("TIME", "time", ALWAYS),
    ("ACTOR", "actor", ALWAYS),
    ("ACTION", "action", ALWAYS),
    ("OBJECT", "object", ALWAYS),
    ("CHANGES", "changes_text", ALWAYS),
    ("COMMAND", "command_id", WIDE),
];

/// `smg context list`.
pub const CONTEXTS: &[Column] = &[
    ("CURRENT", "current", ALWAYS),
    ("NAME", "name", ALWAYS),
    ("SERVER", "server", ALWAYS),
    ("CREDENTIALS", "credentials", ALWAYS),
    ("CA", "ca", WIDE),
];

/// `smg cluster status`.
pub const MEMBERS: &[Column] = &[
    ("NODE", "node_id", ALWAYS),
    ("ROLE", "role", ALWAYS),
    ("HEALTH", "health", ALWAYS),
    ("LAG", "lag", ALWAYS),
    ("HEARD-MS", "heard_ms", ALWAYS),
    ("PEERS", "peer_address", ALWAYS),
    ("API", "api_address", ALWAYS),
    ("TROUBLE", "trouble", ALWAYS),
    ("DISK", "storage_id", WIDE),
];

/// `smg cluster backup`.
pub const BACKUP: &[Column] = &[
    ("FILE", "file", ALWAYS),
    ("REVISION", "revision", ALWAYS),
    ("WORKERS", "workers", ALWAYS),
    ("POLICIES", "policies", ALWAYS),
    ("TOKENS", "tokens", ALWAYS),
    ("KEYS", "keys", ALWAYS),
    ("BYTES", "bytes", ALWAYS),
    ("HISTORY", "history_id", WIDE),
];

/// `smg cluster restore`.
pub const RESTORED: &[Column] = &[
    ("DIRECTORY", "data_dir", ALWAYS),
    ("NODE", "node_id", ALWAYS),
    ("REVISION", "restored_revision", ALWAYS),
    ("HISTORY", "history_id", ALWAYS),
];

/// `smg cluster restore` into etcd.
#[cfg(feature = "etcd")]
pub const RESTORED_IN_ETCD: &[Column] =
    &[("PREFIX", "etcd_prefix", ALWAYS), ("REVISION", "restored_revision", ALWAYS), ("HISTORY", "history_id", ALWAYS)];

/// What became of an accepted change.
pub const ACCEPTED: &[Column] = &[("WORKER", "worker_id", ALWAYS), ("STATUS", "status", ALWAYS)];

/// What an operator wants with a worker.
pub const INTENT: &[Column] =
    &[("WORKER", "worker_id", ALWAYS), ("INTENT", "intent", ALWAYS), ("REVISION", "mod_revision", ALWAYS)];

/// One value of a table; what is not known is a dash.
pub fn cell(value: &Value) -> String {
    match value {
        Value::Null => "-".to_owned(),
        Value::String(text) if text.is_empty() => "-".to_owned(),
        Value::String(text) => text.replace(char::is_control, " "),
        Value::Array(items) if items.is_empty() => "-".to_owned(),
        Value::Array(items) => items.iter().map(cell).collect::<Vec<_>>().join(","),
        other => other.to_string(),
    }
}

/// The value at a path.
fn at<'a>(row: &'a Value, path: &str) -> &'a Value {
    path.split('.').fold(row, |value, name| &value[name])
}

/// The cells of one row.
pub fn cells(columns: &[Column], wide: bool, row: &Value) -> Vec<String> {
    shown(columns, wide).map(|(_, path, _)| cell(at(row, path))).collect()
}

/// The titles.
pub fn titles(columns: &[Column], wide: bool) -> Vec<String> {
    shown(columns, wide).map(|(title, ..)| (*title).to_owned()).collect()
}

fn shown(columns: &[Column], wide: bool) -> impl Iterator<Item = &Column> {
    columns.iter().filter(move |(_, _, only_wide)| wide || !only_wide)
}

/// A table with titles.
pub fn table(columns: &[Column], wide: bool, rows: &[Value]) -> String {
    let all: Vec<Vec<String>> =
        std::iter::once(titles(columns, wide)).chain(rows.iter().map(|row| cells(columns, wide, row))).collect();
    let width = |column: usize| all.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..all[0].len()).map(width).collect();
    all.iter().map(|row| line(row, &widths) + "\n").collect()
}

/// One line of a table whose columns have these widths at least.
pub fn line(row: &[String], widths: &[usize]) -> String {
    let cells = row.iter().zip(widths).map(|(cell, width)| format!("{cell:<width$}"));
    cells.collect::<Vec<_>>().join("  ").trim_end().to_owned()
}

/// Milliseconds since the Unix epoch as people write them, in UTC.
pub fn time(unix_ms: u64) -> String {
    let (seconds, days) = (unix_ms / 1000 % 86_400, unix_ms / 86_400_000);
    // Years begin in March here, so that the day that is sometimes missing is the last one. An era has 400 years.
    let (era, day) = ((days + 719_468) / 146_097, (days + 719_468) % 146_097);
    let year_of_era = (day - day / 1_460 + day / 36_524 - day / 146_096) / 365;
    let day_of_year = day - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let march_month = (5 * day_of_year + 2) / 153;
    let day_of_month = day_of_year - (153 * march_month + 2) / 5 + 1;
    let month = if march_month < 10 { march_month + 3 } else { march_month - 9 };
    let year = era * 400 + year_of_era + u64::from(month <= 2);
    let (hours, minutes, seconds) = (seconds / 3600, seconds / 60 % 60, seconds % 60);
    format!("{year:04}-{month:02}-{day_of_month:02}T{hours:02}:{minutes:02}:{seconds:02}Z")
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_table_has_a_row_for_each_object_and_a_dash_for_what_is_not_known() {
        let rows = [
            json!({"id": "a", "url": "http://p:1", "worker_type": "prefill", "status": "ready", "load": 3}),
            json!({"id": "b", "url": "http://d:12345", "job_status": {"status": "failed", "message": "no\nanswer"}}),
        ];
        let text = table(WORKERS, false, &rows);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines[0], "ID  URL             TYPE     RUNTIME  MODEL  STATUS  INTENT  LOAD");
        assert_eq!(lines[1], "a   http://p:1      prefill  -        -      ready   -       3");
        assert_eq!(lines.len(), 3);
        let wide = table(WORKERS, true, &rows);
        assert!(wide.lines().nth(2).is_some_and(|line| line.ends_with("failed  no answer")), "{wide}");
    }

    #[test]
    fn times_are_those_of_the_calendar() {
        for (unix_ms, text) in [
            (0, "1970-01-01T00:00:00Z"),
            (951_782_400_000, "2000-02-29T00:00:00Z"),
            (1_709_251_199_999, "2024-02-29T23:59:59Z"),
            (1_709_251_200_000, "2024-03-01T00:00:00Z"),
            (4_102_444_800_000, "2100-01-01T00:00:00Z"),
        ] {
            assert_eq!(time(unix_ms), text);
        }
    }
}
