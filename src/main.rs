//! `smg`: a gateway fleet for prefill/decode disaggregated LLM serving.
fn main() {}
