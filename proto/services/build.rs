//! Compiles the service definitions with protox, so that no protoc is needed.
fn main() -> Result<(), Box<dyn std::error::Error>> {
    let descriptors = protox::compile(["proto/sync.proto", "proto/raft.proto"], ["proto", "../messages/proto"])?;
    tonic_prost_build::configure()
        .extern_path(".smg.state.v1", "::smg_messages::state")
        .extern_path(".smg.disk.v1", "::smg_messages::disk")
        .compile_fds(descriptors)?;
    println!("cargo:rerun-if-changed=proto");
    Ok(())
}
