//! A sample's output as a sequence of blocks: runs of reasoning, runs of text, and tool calls.
//!
//! The messages and responses APIs tell the output this way. Blocks follow one another: what begins a new one closes the open one.
//! Only the arguments of a call may come late, and then belong to their call's block, closed or not.

use crate::output::Piece;

/// What a block is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Reasoning,
    Text,
    Call,
}

/// One block.
#[derive(Debug)]
pub(crate) struct Block {
    pub kind: Kind,
    /// The text, the reasoning, or the arguments, so far; empty when texts are not kept.
    pub text: String,
    /// The call's id, name and position among the calls.
    pub id: String,
    pub name: String,
    call: usize,
}

/// Blocks in their order.
#[derive(Debug)]
pub(crate) struct Blocks {
    pub list: Vec<Block>,
    open: bool,
    /// Whether texts are kept.
    keep: bool,
    /// Whether more than one call is let through.
    parallel: bool,
}

/// Where a piece went.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Placed<'a> {
    /// The block that was open and is closed by this piece.
    pub closed: Option<usize>,
    /// The piece's block.
    pub block: usize,
    /// Whether it is new.
    pub opened: bool,
    /// What it adds.
    pub delta: &'a str,
}

impl Blocks {
    pub fn new(keep: bool, parallel: bool) -> Self {
        Self { list: Vec::new(), open: false, keep, parallel }
    }

    /// Puts a piece where it belongs; none when it adds nothing.
    pub fn place<'a>(&mut self, piece: &'a Piece) -> Option<Placed<'a>> {
        match piece {
            Piece::Content(text) => self.run(Kind::Text, text),
            Piece::Reasoning(text) => self.run(Kind::Reasoning, text),
            Piece::ToolCall { index, id, name } => {
                let new =
                    Block { kind: Kind::Call, text: String::new(), id: id.clone(), name: name.clone(), call: *index };
                self.lets(*index).then(|| self.open(new, ""))
            }
            Piece::ToolArguments { index, fragment } => {
                if fragment.is_empty() {
                    return None;
                }
                let block = self.list.iter().rposition(|block| block.kind == Kind::Call && block.call == *index)?;
                Some(self.add(block, fragment))
            }
        }
    }

    /// Closes what is open.
    pub fn close(&mut self) -> Option<usize> {
        std::mem::take(&mut self.open).then(|| self.list.len() - 1)
    }

    /// Whether tools were called.
    pub fn calls(&self) -> bool {
        self.list.iter().any(|block| block.kind == Kind::Call)
    }

    fn lets(&self, call: usize) -> bool {
        self.parallel || call == 0
    }

    fn run<'a>(&mut self, kind: Kind, text: &'a str) -> Option<Placed<'a>> {
        if text.is_empty() {
            return None;
        }
        let last = self.list.last().filter(|block| self.open && block.kind == kind);
        if last.is_some() {
            return Some(self.add(self.list.len() - 1, text));
        }
        let new = Block { kind, text: String::new(), id: String::new(), name: String::new(), call: 0 };
        Some(self.open(new, text))
    }

    fn open<'a>(&mut self, block: Block, delta: &'a str) -> Placed<'a> {
        let closed = self.close();
        self.list.push(block);
        self.open = true;
        Placed { closed, opened: true, ..self.add(self.list.len() - 1, delta) }
    }

    fn add<'a>(&mut self, block: usize, delta: &'a str) -> Placed<'a> {
        if let Some(block) = self.list.get_mut(block).filter(|_| self.keep) {
            block.text.push_str(delta);
        }
        Placed { closed: None, block, opened: false, delta }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
mod tests {
    use super::*;

    fn call(index: usize) -> Piece {
        Piece::ToolCall { index, id: format!("call_{index}"), name: "f".to_owned() }
    }

    fn arguments(index: usize, fragment: &str) -> Piece {
        Piece::ToolArguments { index, fragment: fragment.to_owned() }
    }

    #[test]
    fn a_new_kind_closes_the_open_block() {
        let mut blocks = Blocks::new(true, true);
        let pieces = [
            Piece::Reasoning("a".to_owned()),
            Piece::Reasoning("b".to_owned()),
            Piece::Content(String::new()),
            Piece::Content("c".to_owned()),
            call(0),
            call(1),
            arguments(1, "{}"),
            arguments(0, "{\"late\":1}"),
            arguments(7, "of no call"),
            Piece::Content("d".to_owned()),
        ];
        let placed: Vec<_> = pieces.iter().filter_map(|piece| blocks.place(piece)).collect();
        let steps: Vec<_> = placed.iter().map(|placed| (placed.closed, placed.block, placed.opened)).collect();
        let expected = [
            (None, 0, true),
            (None, 0, false),
            (Some(0), 1, true),
            (Some(1), 2, true),
            (Some(2), 3, true),
            (None, 3, false),
            (None, 2, false),
            (Some(3), 4, true),
        ];
        assert_eq!(steps, expected);
        assert_eq!((blocks.close(), blocks.close()), (Some(4), None));
        let texts: Vec<_> = blocks.list.iter().map(|block| block.text.as_str()).collect();
        assert_eq!(texts, ["ab", "c", "{\"late\":1}", "{}", "d"]);
    }

    #[test]
    fn only_the_first_call_is_let_through_when_calls_may_not_be_parallel() {
        let mut blocks = Blocks::new(true, false);
        for piece in [call(0), arguments(0, "{}"), call(1), arguments(1, "[]")] {
            blocks.place(&piece);
        }
        assert_eq!(blocks.list.len(), 1);
        assert_eq!(blocks.list[0].text, "{}");
    }
}
