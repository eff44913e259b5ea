//! Traces reach an OpenTelemetry collector: one per request over both legs, a span per phase, and nothing waits for the collector.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod support;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use opentelemetry_proto::tonic::collector::trace::v1::trace_service_server::{TraceService, TraceServiceServer};
use opentelemetry_proto::tonic::collector::trace::v1::{ExportTraceServiceRequest, ExportTraceServiceResponse};
use opentelemetry_proto::tonic::common::v1::KeyValue;
use opentelemetry_proto::tonic::common::v1::any_value::Value as Kind;
use opentelemetry_proto::tonic::trace::v1::Span;
use opentelemetry_proto::tonic::trace::v1::span::SpanKind;
use serde_json::{Value, json};
use support::*;
use tokio_stream::wrappers::TcpListenerStream;

const TRACE: &str = "4bf92f3577b34da6a3ce929d0e0e4736";
const CLIENT_SPAN: &str = "00f067aa0ba902b7";

/// A collector that keeps what it gets.
#[derive(Debug, Clone, Default)]
struct Collector {
    received: Arc<Mutex<Vec<Span>>>,
    resources: Arc<Mutex<Vec<BTreeMap<String, String>>>>,
}

#[tonic::async_trait]
impl TraceService for Collector {
    async fn export(
        &self,
        request: tonic::Request<ExportTraceServiceRequest>,
    ) -> Result<tonic::Response<ExportTraceServiceResponse>, tonic::Status> {
        for resource in request.into_inner().resource_spans {
            self.resources.lock().unwrap().push(attributes(&resource.resource.unwrap().attributes));
            self.received.lock().unwrap().extend(resource.scope_spans.into_iter().flat_map(|scope| scope.spans));
        }
        Ok(tonic::Response::new(ExportTraceServiceResponse::default()))
    }
}

impl Collector {
    /// Serves it; its address.
    async fn start() -> (Self, String) {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let collector = Self::default();
        let service = TraceServiceServer::new(collector.clone());
        let serving = tonic::transport::Server::builder().add_service(service);
        tokio::spawn(serving.serve_with_incoming(TcpListenerStream::new(listener)));
        (collector, address)
    }

    /// The spans of the request with this id, once its root and `count` below it are there.
    async fn trace(&self, request_id: &str, count: usize) -> (Span, Vec<Span>) {
        eventually(&format!("the trace of {request_id}"), || async {
            let received = self.received.lock().unwrap().clone();
            let root = received
                .iter()
                .find(|span| attributes(&span.attributes).get("smg.request_id").is_some_and(|id| id == request_id))?;
            let children = |of: &Span| {
                received.iter().filter(|span| span.parent_span_id == of.span_id).cloned().collect::<Vec<_>>()
            };
            let legs = children(root);
            let inner: Vec<Span> = legs.iter().flat_map(children).collect();
            let others: Vec<Span> = legs.into_iter().chain(inner).collect();
            (others.len() >= count).then(|| (root.clone(), others))
        })
        .await
    }
}

fn attributes(list: &[KeyValue]) -> BTreeMap<String, String> {
    let text = |attribute: &KeyValue| match attribute.value.as_ref().unwrap().value.as_ref().unwrap() {
        Kind::StringValue(text) => text.clone(),
        Kind::IntValue(number) => number.to_string(),
        Kind::BoolValue(flag) => flag.to_string(),
        other => panic!("{other:?}"),
    };
    list.iter().map(|attribute| (attribute.key.clone(), text(attribute))).collect()
}

fn named<'a>(spans: &'a [Span], name: &str) -> &'a Span {
    let found: Vec<_> = spans.iter().filter(|span| span.name == name).collect();
    assert_eq!(found.len(), 1, "{name} in {:?}", spans.iter().map(|span| &span.name).collect::<Vec<_>>());
    found[0]
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Asks as a client whose own span is `traceparent`.
async fn ask(smg: &Smg, id: &str, traceparent: Option<&str>, body: &Value) -> reqwest::Response {
    let mut request = smg.client.post(format!("{}/v1/chat/completions", smg.url)).header("x-request-id", id).json(body);
    if let Some(traceparent) = traceparent {
        request = request.header("traceparent", traceparent).header("tracestate", "vendor=1");
    }
    request.send().await.unwrap()
}

fn sent_parent(engine: &MockEngine) -> String {
    let request = engine.requests().into_iter().rfind(|request| request.path == "/v1/chat/completions").unwrap();
    request.header("traceparent").unwrap().to_owned()
}

#[tokio::test]
async fn one_trace_covers_both_legs_of_each_dispatch_with_a_span_per_phase() {
    let (collector, address) = Collector::start().await;
    let flags = ["--enable-trace", "--otlp-traces-endpoint", &address];
    for dispatch in DISPATCHES {
        let serving = Serving::start(dispatch, &flags).await;
        for (body, kind) in [(chat(), "whole"), (chat_stream(), "stream")] {
            let id = format!("{dispatch:?}-{kind}");
            let parent = format!("00-{TRACE}-{CLIENT_SPAN}-01");
            let response = ask(&serving.smg, &id, Some(&parent), &body).await;
            assert_eq!(response.status(), 200);
            let returned = response.headers()["traceparent"].to_str().unwrap().to_owned();
            response.bytes().await.unwrap();

            let phases: &[&str] = match dispatch {
                Dispatch::Regular => &["route", "regular", "first_byte", "relay"],
                _ => &["route", "prefill", "decode", "first_byte", "relay"],
            };
            let (root, all) = collector.trace(&id, phases.len()).await;
            assert_eq!((hex(&root.trace_id).as_str(), hex(&root.parent_span_id).as_str()), (TRACE, CLIENT_SPAN));
            assert_eq!(returned, format!("00-{TRACE}-{}-01", hex(&root.span_id)));
            assert_eq!((root.name.as_str(), root.kind()), ("http_request", SpanKind::Server));
            let said = attributes(&root.attributes);
            assert_eq!((&*said["http.route"], &*said["http.response.status_code"]), ("/v1/chat/completions", "200"));

            let legs: Vec<Span> = all.iter().filter(|span| span.parent_span_id == root.span_id).cloned().collect();
            let output = named(&legs, if dispatch == Dispatch::Regular { "regular" } else { "decode" });
            let inner: Vec<Span> = all.iter().filter(|span| span.parent_span_id == output.span_id).cloned().collect();
            assert_eq!(legs.len() + inner.len(), phases.len(), "{id}");
            named(&inner, "first_byte");
            named(&inner, "relay");
            let route = named(&legs, "route");
            assert!(route.start_time_unix_nano >= root.start_time_unix_nano);
            for span in legs.iter().chain(&inner) {
                assert!(span.start_time_unix_nano <= span.end_time_unix_nano, "{} ends before it starts", span.name);
                assert!(span.status.as_ref().is_none_or(|status| status.code == 0), "{}: {:?}", span.name, span.status);
            }
            assert_eq!(output.kind(), SpanKind::Client);
            assert_eq!(attributes(&output.attributes)["server.address"], serving.output.url());
            assert_eq!(sent_parent(&serving.output), format!("00-{TRACE}-{}-01", hex(&output.span_id)));
            if let Some(engine) = &serving.prefill {
                let prefill = named(&legs, "prefill");
                assert_eq!(attributes(&prefill.attributes)["server.address"], engine.url());
                assert_eq!(sent_parent(engine), format!("00-{TRACE}-{}-01", hex(&prefill.span_id)));
            }
            assert_eq!(serving.smg.decision(&id).await["trace_id"], TRACE);
        }
    }
    let resource = collector.resources.lock().unwrap()[0].clone();
    assert_eq!(resource["service.name"], "smg");
}

#[tokio::test]
async fn a_retried_and_a_failed_request_show_each_attempt_and_what_went_wrong() {
    let (collector, address) = Collector::start().await;
    let flags = ["--enable-trace", "--otlp-traces-endpoint", &address, "--retry-initial-backoff-ms", "1"];
    let (smg, _prefill, decode) = nixl_pair(&flags).await;
    decode.set_fault(Fault::generation().status(503, "{}").times(1));
    assert_eq!(ask(&smg, "retried", None, &chat()).await.status(), 200);
    let (root, spans) = collector.trace("retried", 8).await;
    assert!(root.parent_span_id.is_empty() && root.status.is_none());
    let count = |name: &str| spans.iter().filter(|span| span.name == name).count();
    assert_eq!(["route", "prefill", "decode", "first_byte", "relay"].map(count), [2, 2, 2, 1, 1]);
    let failed: Vec<_> =
        spans.iter().filter(|span| span.status.as_ref().is_some_and(|status| status.code == 2)).collect();
    assert_eq!(failed.iter().map(|span| span.name.as_str()).collect::<Vec<_>>(), ["decode"]);
    assert!(failed[0].status.as_ref().unwrap().message.contains("503"));

    assert_eq!(ask(&smg, "unknown", None, &json!({"model": "none", "messages": []})).await.status(), 404);
    let (root, spans) = collector.trace("unknown", 1).await;
    assert_eq!(root.status.unwrap().message, "model_not_found");
    assert!(named(&spans, "route").status.is_some());
}

#[tokio::test]
async fn a_clients_unrecorded_trace_is_passed_on_untouched_and_not_recorded() {
    let (collector, address) = Collector::start().await;
    let (smg, prefill, decode) = sglang_pair(&["--enable-trace", "--otlp-traces-endpoint", &address]).await;
    let parent = format!("00-{TRACE}-{CLIENT_SPAN}-00");
    let response = ask(&smg, "unrecorded", Some(&parent), &chat()).await;
    assert!(!response.headers().contains_key("traceparent"));
    assert_eq!([sent_parent(&prefill), sent_parent(&decode)], [parent.clone(), parent]);
    // A malformed one begins a new trace instead.
    let response = ask(&smg, "malformed", Some("00-xyz"), &chat()).await;
    assert_eq!(response.status(), 200);
    let (root, _) = collector.trace("malformed", 5).await;
    assert!(root.parent_span_id.is_empty());
    assert!(sent_parent(&decode).starts_with(&format!("00-{}-", hex(&root.trace_id))));
    assert!(collector.received.lock().unwrap().iter().all(|span| hex(&span.trace_id) != TRACE));
    eventually("sent spans are counted", || async {
        (smg.metric("smg_trace_spans_exported_total", &[]).await >= 6.0).then_some(())
    })
    .await;
}

#[tokio::test]
async fn without_tracing_trace_context_is_merely_forwarded() {
    let (smg, prefill, decode) = sglang_pair(&[]).await;
    let parent = format!("00-{TRACE}-{CLIENT_SPAN}-01");
    let response = ask(&smg, "off", Some(&parent), &chat()).await;
    assert!(!response.headers().contains_key("traceparent"));
    assert_eq!([sent_parent(&prefill), sent_parent(&decode)], [parent.clone(), parent]);
    assert!(smg.decision("off").await.get("trace_id").is_none());
}

#[tokio::test]
async fn a_collector_that_is_away_costs_spans_and_no_request() {
    let address = format!("127.0.0.1:{}", free_port());
    let (smg, _prefill, _decode) = sglang_pair(&["--enable-trace", "--otlp-traces-endpoint", &address]).await;
    for number in 0..20 {
        assert_eq!(ask(&smg, &format!("away-{number}"), None, &chat()).await.status(), 200);
    }
    eventually("lost spans are counted", || async {
        let dropped = smg.metric("smg_trace_spans_dropped_total", &[("reason", "export_failed")]).await;
        (dropped >= 100.0).then_some(())
    })
    .await;
    smg.logged(&["traces cannot be exported"]).await;
    assert_eq!(smg.log().matches("traces cannot be exported").count(), 1);
}

#[tokio::test]
async fn spans_of_the_last_requests_are_sent_before_the_process_ends() {
    let (collector, address) = Collector::start().await;
    let (mut smg, _prefill, _decode) =
        sglang_pair(&["--enable-trace", "--otlp-traces-endpoint", &address, "--shutdown-grace-period-secs", "1"]).await;
    assert_eq!(ask(&smg, "last", None, &chat()).await.status(), 200);
    smg.signal("TERM");
    assert!(smg.exited().await.success());
    collector.trace("last", 5).await;
}

#[tokio::test]
async fn whoever_asks_gets_the_decision_on_the_response_itself() {
    let (smg, prefill, decode) = nixl_pair(&["--retry-initial-backoff-ms", "1"]).await;
    let explained = async |id: &str, value: &str| {
        let request = smg.client.post(format!("{}/v1/chat/completions", smg.url)).header("x-request-id", id);
        let response = request.header("x-smg-decision", value).json(&chat()).send().await.unwrap();
        let header = response.headers().get("x-smg-decision").map(|line| line.to_str().unwrap().to_owned());
        (response.status().as_u16(), header)
    };
    let (status, line) = explained("asked", "1").await;
    let line = line.unwrap();
    let fields: BTreeMap<&str, &str> = line.split("; ").map(|field| field.split_once('=').unwrap()).collect();
    assert_eq!((status, fields["attempts"], fields["dispatch"]), (200, "1", "sequential"));
    assert_eq!((fields["prefill"], fields["decode"]), (prefill.url().as_str(), decode.url().as_str()));
    assert!(fields["prefill_policy"].starts_with("cache_aware/"), "{line}");
    assert_eq!((fields["kv_connector_mode"], fields["kv_handoff"]), ("nixl", "true"));
    let time = |name: &str| fields[name].parse::<f64>().unwrap();
    assert!(time("selected_ms") <= time("prefill_done_ms") && time("prefill_done_ms") <= time("decode_head_ms"));
    let record = smg.decision("asked").await;
    assert_eq!(record["attempts"][0]["decode_head_ms"], json!(time("decode_head_ms")));

    decode.set_fault(Fault::generation().status(503, "{}").times(1));
    let (status, line) = explained("retried", "true").await;
    assert!(status == 200 && line.as_ref().unwrap().contains("attempts=2"), "{line:?}");
    assert!(line.unwrap().ends_with("failed=decode_unavailable"));
    decode.set_fault(Fault::generation().status(400, "{}").times(1));
    let (status, line) = explained("refused", "1").await;
    assert!(status == 400 && line.as_ref().unwrap().contains("failed=decode_bad_request"), "{line:?}");
    for unasked in ["0", "false"] {
        assert_eq!(explained("unasked", unasked).await.1, None);
    }
    assert!(prefill.requests().iter().all(|request| request.header("x-smg-decision").is_none()));
}

#[tokio::test]
async fn a_decision_record_has_every_phase_every_attempt_and_every_reason() {
    let (smg, prefill, decode) = nixl_pair(&["--retry-initial-backoff-ms", "20"]).await;
    let other = vllm(Role::Decode, Connector::Nixl).await;
    smg.register(&spec_with(&other, "decode", json!({"kv_connector": "NixlConnector"}))).await;
    for engine in [&decode, &other] {
        engine.set_fault(Fault::generation().status(503, "{}").times(1));
    }
    assert_eq!(smg.post_as("r", "/v1/chat/completions", &chat()).await.status(), 200);
    let record = smg.decision("r").await;
    assert_eq!((&record["outcome"], &record["status"]), (&json!("completed"), &json!(200)));
    let attempts = record["attempts"].as_array().unwrap();
    assert_eq!(attempts.len(), 3);
    let mut earlier = 0.0;
    for (number, attempt) in attempts.iter().enumerate() {
        assert_eq!(attempt["prefill"], prefill.url());
        let mut phases =
            vec!["began_ms", "selected_ms", "prefill_sent_ms", "prefill_head_ms", "prefill_done_ms", "decode_sent_ms"];
        if number < 2 {
            phases.push("failed_ms");
            assert!(attempt["error"].as_str().unwrap().starts_with("decode_unavailable"), "{attempt}");
        } else {
            phases.extend(["decode_head_ms", "first_output_ms"]);
            assert!(attempt.get("error").is_none() && attempt.get("failed_ms").is_none());
        }
        for phase in phases {
            let at = attempt[phase].as_f64().unwrap_or_else(|| panic!("{phase} of attempt {number}: {attempt}"));
            assert!(at >= earlier, "{phase} of attempt {number}: {attempt}");
            earlier = at;
        }
        assert!(attempt["picks"].as_array().is_some_and(|picks| picks.iter().any(|pick| pick["leg"] == "prefill")));
    }
    assert!(record["finished_ms"].as_f64().unwrap() >= earlier);
    let pause = |number: usize| {
        attempts[number]["began_ms"].as_f64().unwrap() - attempts[number - 1]["failed_ms"].as_f64().unwrap()
    };
    assert!(pause(1) >= 10.0, "the pause before a retry shows");
    let passed_over = attempts[1]["excluded"].as_array().unwrap();
    assert!(!passed_over.is_empty() && passed_over.iter().all(|one| one["reason"].is_string()), "{passed_over:?}");
}
