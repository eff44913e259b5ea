//! Spans as OTLP says them (OpenTelemetry protocol 1.x, `opentelemetry.proto.trace.v1`).

use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
use opentelemetry_proto::tonic::common::v1::any_value::Value as AnyValueKind;
use opentelemetry_proto::tonic::common::v1::{AnyValue, InstrumentationScope, KeyValue};
use opentelemetry_proto::tonic::resource::v1::Resource;
use opentelemetry_proto::tonic::trace::v1::span::SpanKind;
use opentelemetry_proto::tonic::trace::v1::status::StatusCode;
use opentelemetry_proto::tonic::trace::v1::{ResourceSpans, ScopeSpans, Span as OtlpSpan, Status};

use super::{Kind, Span, Value};

/// The name of this service among others.
const SERVICE: &str = "smg";

/// One export of `spans` by the process `instance`.
pub(super) fn request(spans: Vec<Span>, instance: &str) -> ExportTraceServiceRequest {
    let attributes = vec![
        attribute("service.name", SERVICE.into()),
        attribute("service.version", env!("CARGO_PKG_VERSION").into()),
        attribute("service.instance.id", instance.into()),
    ];
    let scope = InstrumentationScope { name: SERVICE.to_owned(), ..InstrumentationScope::default() };
    let spans = spans.into_iter().map(span).collect();
    let scope_spans = vec![ScopeSpans { scope: Some(scope), spans, ..ScopeSpans::default() }];
    let resource = Some(Resource { attributes, ..Resource::default() });
    ExportTraceServiceRequest {
        resource_spans: vec![ResourceSpans { resource, scope_spans, ..ResourceSpans::default() }],
    }
}

fn span(span: Span) -> OtlpSpan {
    let kind = match span.kind {
        Kind::Server => SpanKind::Server,
        Kind::Client => SpanKind::Client,
        Kind::Internal => SpanKind::Internal,
    };
    let status = span.error.map(|message| Status { message, code: StatusCode::Error.into() });
    OtlpSpan {
        trace_id: span.context.trace_id.to_be_bytes().to_vec(),
        span_id: span.context.span_id.to_be_bytes().to_vec(),
        parent_span_id: span.parent.map(|id| id.to_be_bytes().to_vec()).unwrap_or_default(),
        // Sampled.
        flags: 1,
        name: span.name.to_owned(),
        kind: kind.into(),
        start_time_unix_nano: span.start,
        end_time_unix_nano: span.end.max(span.start),
        attributes: span.attributes.into_iter().map(|(name, value)| attribute(name, value)).collect(),
        status,
        ..OtlpSpan::default()
    }
}

fn attribute(name: &str, value: Value) -> KeyValue {
    let value = match value {
        Value::Text(text) => AnyValueKind::StringValue(text),
        Value::Number(number) => AnyValueKind::IntValue(number),
        Value::Flag(flag) => AnyValueKind::BoolValue(flag),
    };
    KeyValue { key: name.to_owned(), value: Some(AnyValue { value: Some(value) }), ..KeyValue::default() }
}
