//! How much of others' words is kept and repeated.
//!
//! Clients and engines write what they like into names and messages. What is kept of a request after its end, and what is said back to a
//! client, has a bound.

/// Most bytes of a message that a record of a request keeps.
pub const KEPT: usize = 512;
/// Most bytes of a message that a client gets.
pub const SAID: usize = 4096;

/// The text, cut to at most `limit` bytes, which is then seen.
pub fn cut(text: String, limit: usize) -> String {
    if text.len() <= limit {
        return text;
    }
    format!("{}...", text.get(..text.floor_char_boundary(limit)).unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_text_is_cut_between_characters() {
        assert_eq!(cut("short".to_owned(), 5), "short");
        assert_eq!(cut("äää".to_owned(), 3), "ä...");
    }
}
