//! A response as one document.

use bytes::BytesMut;

use super::Stored;
use super::object::Response;
use crate::answer::{Answer, Failure};
use crate::blocks::Kind;
use crate::output::{Finish, Step};

pub(super) struct Whole(Response);

impl Whole {
    pub fn new(response: Response) -> Self {
        Self(response)
    }
}

impl Answer for Whole {
    fn start(&mut self, _: &mut BytesMut) {}

    fn step(&mut self, step: &Step, _: &mut BytesMut) {
        if step.sample != 0 {
            return;
        }
        let response = &mut self.0;
        let mut entries = response.entries.settle(step, response.form.top_logprobs);
        for piece in &step.pieces {
            let Some(placed) = response.blocks.place(piece) else { continue };
            if response.blocks.list.get(placed.block).is_some_and(|block| block.kind == Kind::Text) {
                response.entries.keep(placed.block, &std::mem::take(&mut entries));
            }
        }
    }

    fn finish(&mut self, finish: &Finish, _: &mut BytesMut) {
        if finish.sample == 0 && self.0.finish.is_none() {
            self.0.finish = Some(Finish { prompt_logprobs: Vec::new(), ..finish.clone() });
        }
    }

    fn end(&mut self, out: &mut BytesMut) {
        self.0.write(self.0.status(), out);
    }

    fn fail(&mut self, _: &Failure, _: &mut BytesMut) {}

    fn stored(&mut self) -> Option<Stored> {
        self.0.stored()
    }
}
