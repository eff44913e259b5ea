//! What engines say about themselves and their model over gRPC, as the JSON document that `GET /get_server_info` and
//! `GET /get_model_info` answer.
//!
//! Every field of the engine's message is there under its name. What SGLang and TokenSpeed keep in `server_args` stands beside the others, as
//! SGLang's own HTTP server has it, and `version` is the engine's.

use prost_types::value::Kind;
use serde_json::{Map, Value, json};
use smg_services::engines::{sglang, tokenspeed, vllm};
use tonic::Status;

use super::client::Client;

impl Client {
    /// What the engine says about itself.
    ///
    /// # Errors
    /// When it says nothing.
    pub async fn server_info(&self) -> Result<Value, Status> {
        Ok(match self.clone() {
            Self::Sglang(mut client) => {
                of_sglang(client.get_server_info(sglang::GetServerInfoRequest {}).await?.into_inner())
            }
            Self::Vllm(mut client) => {
                of_vllm(client.get_server_info(vllm::GetServerInfoRequest {}).await?.into_inner())
            }
            Self::Tokenspeed(mut client) => {
                of_tokenspeed(client.get_server_info(tokenspeed::GetServerInfoRequest {}).await?.into_inner())
            }
        })
    }

    /// What it says about its model.
    ///
    /// # Errors
    /// When it says nothing.
    pub async fn model_info(&self) -> Result<Value, Status> {
        Ok(match self.clone() {
            Self::Sglang(mut client) => {
                model_of_sglang(client.get_model_info(sglang::GetModelInfoRequest {}).await?.into_inner())
            }
            Self::Vllm(mut client) => {
                model_of_vllm(client.get_model_info(vllm::GetModelInfoRequest {}).await?.into_inner())
            }
            Self::Tokenspeed(mut client) => {
                model_of_tokenspeed(client.get_model_info(tokenspeed::GetModelInfoRequest {}).await?.into_inner())
            }
        })
    }
}

fn of_sglang(info: sglang::GetServerInfoResponse) -> Value {
    let scheduler = object(info.scheduler_info);
    let own = json!({
        "active_requests": info.active_requests,
        "is_paused": info.is_paused,
        "last_receive_timestamp": info.last_receive_timestamp,
        "uptime_seconds": info.uptime_seconds,
        "version": info.sglang_version,
        "server_type": info.server_type,
        "max_total_num_tokens": info.max_total_num_tokens,
        "scheduler_info": scheduler,
    });
    beside(object(info.server_args), own)
}

fn of_vllm(info: vllm::GetServerInfoResponse) -> Value {
    json!({
        "active_requests": info.active_requests,
        "is_paused": info.is_paused,
        "last_receive_timestamp": info.last_receive_timestamp,
        "uptime_seconds": info.uptime_seconds,
        "server_type": info.server_type,
        "kv_connector": info.kv_connector,
        "kv_role": info.kv_role,
        "kv_engine_id": info.kv_engine_id,
        "data_parallel_size": info.data_parallel_size,
        "shm_namespace_id": info.shm_namespace_id,
        "kv_cache_dtype": info.kv_cache_dtype,
        "block_size": info.block_size,
        "attention_backend": info.attention_backend,
        "model_dtype": info.model_dtype,
        "pairing_protocol": info.pairing_protocol,
        "mm_processor": info.mm_processor,
        "mm_media_ref_schemes": info.mm_media_ref_schemes,
        "mm_processor_source": info.mm_processor_source,
        "mm_device_do_normalize": info.mm_device_do_normalize,
        "max_num_seqs": info.max_num_seqs,
        "mm_item_limits": info.mm_item_limits,
        "multimodal_encoder_dtype": info.multimodal_encoder_dtype,
        "engine_reasoning_parser": info.engine_reasoning_parser,
        "constrained_decoding_start": info.constrained_decoding_start,
        "mm_encoder_budget": info.mm_encoder_budget,
    })
}

fn of_tokenspeed(info: tokenspeed::GetServerInfoResponse) -> Value {
    let scheduler = object(info.scheduler_info);
    let own = json!({
        "active_requests": info.active_requests,
        "is_paused": info.is_paused,
        "uptime_seconds": info.uptime_seconds,
        "max_total_num_tokens": info.max_total_num_tokens,
        "version": info.tokenspeed_version,
        "constrained_decoding": info.constrained_decoding,
        "scheduler_info": scheduler,
    });
    beside(object(info.server_args), own)
}

fn model_of_sglang(info: sglang::GetModelInfoResponse) -> Value {
    json!({
        "model_path": info.model_path,
        "tokenizer_path": info.tokenizer_path,
        "is_generation": info.is_generation,
        "preferred_sampling_params": info.preferred_sampling_params,
        "weight_version": info.weight_version,
        "served_model_name": info.served_model_name,
        "max_context_length": info.max_context_length,
        "vocab_size": info.vocab_size,
        "supports_vision": info.supports_vision,
        "model_type": info.model_type,
        "eos_token_ids": info.eos_token_ids,
        "pad_token_id": info.pad_token_id,
        "bos_token_id": info.bos_token_id,
        "max_req_input_len": info.max_req_input_len,
        "architectures": info.architectures,
        "id2label_json": info.id2label_json,
        "num_labels": info.num_labels,
        "default_sampling_params_json": info.default_sampling_params_json,
    })
}

fn model_of_vllm(info: vllm::GetModelInfoResponse) -> Value {
    json!({
        "model_path": info.model_path,
        "is_generation": info.is_generation,
        "max_context_length": info.max_context_length,
        "vocab_size": info.vocab_size,
        "supports_vision": info.supports_vision,
        "served_model_name": info.served_model_name,
        "tokenizer_path": info.tokenizer_path,
        "model_type": info.model_type,
        "architectures": info.architectures,
        "eos_token_ids": info.eos_token_ids,
        "pad_token_id": info.pad_token_id,
        "bos_token_id": info.bos_token_id,
        "max_req_input_len": info.max_req_input_len,
        "default_sampling_params_json": info.default_sampling_params_json,
    })
}

fn model_of_tokenspeed(info: tokenspeed::GetModelInfoResponse) -> Value {
    json!({
        "model_path": info.model_path,
        "tokenizer_path": info.tokenizer_path,
        "served_model_name": info.served_model_name,
        "model_type": info.model_type,
        "architectures": info.architectures,
        "max_context_length": info.max_context_length,
        "max_req_input_len": info.max_req_input_len,
        "vocab_size": info.vocab_size,
        "eos_token_ids": info.eos_token_ids,
        "pad_token_id": info.pad_token_id,
        "bos_token_id": info.bos_token_id,
        "weight_version": info.weight_version,
        "default_sampling_params_json": info.default_sampling_params_json,
        "supports_vision": info.supports_vision,
        "supports_multimodal": info.supports_multimodal,
        "model_dtype": info.model_dtype,
        "multimodal_encoder_dtype": info.multimodal_encoder_dtype,
    })
}

/// The members of both; where both have one of the same name, `own` counts.
fn beside(mut arguments: Map<String, Value>, own: Value) -> Value {
    if let Value::Object(own) = own {
        arguments.extend(own);
    }
    Value::Object(arguments)
}

fn object(fields: Option<prost_types::Struct>) -> Map<String, Value> {
    let fields = fields.map(|fields| fields.fields).unwrap_or_default();
    fields.into_iter().map(|(name, value)| (name, of(value))).collect()
}

/// The value as JSON. Numbers without a fraction are integers: the message knows only one kind.
fn of(value: prost_types::Value) -> Value {
    match value.kind {
        Some(Kind::StringValue(text)) => Value::from(text),
        Some(Kind::BoolValue(flag)) => Value::from(flag),
        Some(Kind::NumberValue(number)) if number.fract() == 0.0 && number.abs() < 1e15 => Value::from(number as i64),
        Some(Kind::NumberValue(number)) => Value::from(number),
        Some(Kind::ListValue(list)) => list.values.into_iter().map(of).collect(),
        Some(Kind::StructValue(fields)) => Value::Object(object(Some(fields))),
        Some(Kind::NullValue(_)) | None => Value::Null,
    }
}
