//! Compiles the service definitions with protox, so that no protoc is needed.
use prost::Message;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let ours = ["proto/sync.proto", "proto/raft.proto", "proto/admin.proto", "proto/etcd.proto"];
    let messages = "../messages/proto";
    let engines = ["sglang", "vllm", "tokenspeed"].map(|engine| format!("{messages}/engines/{engine}.proto"));
    let files = ours.into_iter().chain(engines.iter().map(String::as_str));
    let descriptors = protox::compile(files, ["proto", messages])?;
    tonic_prost_build::configure()
        .extern_path(".smg.state.v1", "::smg_messages::state")
        .extern_path(".smg.admission.v1", "::smg_messages::admission")
        .extern_path(".smg.disk.v1", "::smg_messages::disk")
        .extern_path(".smg.grpc.common", "::smg_messages::engines::common")
        .extern_path(".sglang.grpc.scheduler", "::smg_messages::engines::sglang")
        .extern_path(".vllm.grpc.engine", "::smg_messages::engines::vllm")
        .extern_path(".tokenspeed.grpc.scheduler", "::smg_messages::engines::tokenspeed")
        .compile_fds(descriptors)?;
    // What reflection shows: the admin service and what it names.
    let shown = protox::compile(["proto/admin.proto"], ["proto", messages])?;
    let directory = std::env::var_os("OUT_DIR").ok_or("cargo sets OUT_DIR")?;
    std::fs::write(std::path::Path::new(&directory).join("admin.bin"), shown.encode_to_vec())?;
    println!("cargo:rerun-if-changed=proto");
    println!("cargo:rerun-if-changed={messages}");
    Ok(())
}
