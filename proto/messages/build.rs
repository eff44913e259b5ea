//! Compiles the message definitions with protox, so that no protoc is needed.
fn main() -> Result<(), Box<dyn std::error::Error>> {
    let ours = ["proto/state.proto", "proto/disk.proto"];
    let engines = ["common", "sglang", "vllm", "tokenspeed"].map(|engine| format!("proto/engines/{engine}.proto"));
    let descriptors = protox::compile(ours.into_iter().chain(engines.iter().map(String::as_str)), ["proto"])?;
    prost_build::Config::new().btree_map(["."]).compile_fds(descriptors)?;
    println!("cargo:rerun-if-changed=proto");
    Ok(())
}
