//! Compiles the message definitions with protox, so that no protoc is needed.
fn main() -> Result<(), Box<dyn std::error::Error>> {
    let files = ["proto/state.proto", "proto/disk.proto"];
    let descriptors = protox::compile(files, ["proto"])?;
    prost_build::Config::new().btree_map(["."]).compile_fds(descriptors)?;
    println!("cargo:rerun-if-changed=proto");
    Ok(())
}
