//! Reasoning between marks at the beginning of the output.

use super::cursor::{Cursor, Sink};
use super::names::ReasoningParser;
use crate::markers::Markers;

/// Reads the reasoning, if the output begins with some, up to the answer.
///
/// `opened`: whether the prompt has opened the reasoning already, or closed it; when it did neither the family's habit
/// counts. `begins`: what begins a call, which ends the reasoning of families that may call without closing it.
pub(super) async fn read(cursor: &mut Cursor, parser: ReasoningParser, opened: Option<bool>, begins: &[&str]) {
    let Some(marks) = parser.marks() else { return };
    let inside = opened.unwrap_or(marks.habit);
    cursor.set_reasoning(inside);
    // The opening mark may be repeated inside, and has to come first outside.
    cursor.mark();
    cursor.space().await;
    let opens = cursor.follows(marks.open).await;
    if opens {
        cursor.settle();
    } else if inside {
        cursor.recover_to(Sink::Reasoning);
    } else {
        cursor.recover();
        return;
    }
    cursor.set_reasoning(true);
    let early = if marks.calls_end_it { begins } else { &[] };
    let ends: Vec<&str> = std::iter::once(marks.close).chain(early.iter().copied()).collect();
    if let Some(number) = cursor.pass(&Markers::new(&ends), Sink::Reasoning).await
        && number > 0
    {
        cursor.put_back(ends[number]);
    }
    cursor.set_reasoning(false);
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use smg_apis::Piece;

    use crate::reader::{Parsers, ReasoningParser, testing};

    fn read(parser: &str, opened: Option<bool>, text: &str) -> (String, String) {
        let parsers = Parsers { reasoning: ReasoningParser::named(parser).unwrap(), ..Parsers::default() };
        let mut split = (String::new(), String::new());
        for piece in testing::read(parsers, opened, text) {
            match piece {
                Piece::Reasoning(text) => split.0 += &text,
                Piece::Content(text) => split.1 += &text,
                other => unreachable!("{other:?}"),
            }
        }
        split
    }

    fn halves(reasoning: &str, content: &str) -> (String, String) {
        (reasoning.to_owned(), content.to_owned())
    }

    #[test]
    fn reasoning_between_marks_is_told_apart() {
        assert_eq!(read("qwen3", None, "<think>Hm < no.</think>Yes <think>"), halves("Hm < no.", "Yes <think>"));
        assert_eq!(read("kimi", None, "◁think▷Hm◁/think▷Yes"), halves("Hm", "Yes"));
    }

    #[test]
    fn without_the_opening_mark_the_family_decides() {
        assert_eq!(read("qwen3", None, " Yes."), halves("", " Yes."));
        assert_eq!(read("deepseek_r1", None, "Hm</think>Yes."), halves("Hm", "Yes."));
        assert_eq!(read("deepseek_r1", None, "<think>Hm</think>Yes."), halves("Hm", "Yes."));
    }

    #[test]
    fn a_prompt_that_opened_or_closed_the_reasoning_decides_for_the_family() {
        assert_eq!(read("qwen3", Some(true), "Hm</think>Yes."), halves("Hm", "Yes."));
        assert_eq!(read("deepseek_r1", Some(false), "Yes."), halves("", "Yes."));
    }

    #[test]
    fn reasoning_that_never_ends_stays_reasoning() {
        assert_eq!(read("qwen3", None, "<think>Hm </thin"), halves("Hm </thin", ""));
    }
}
