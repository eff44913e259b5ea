//! The admin API over gRPC: the same operations, roles, codes and outcomes as REST.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use axum::Router;
use futures::StreamExt;
use serde_json::json;
use smg_fleet::{Role, StartupToken, TokenHash};
use smg_messages::state;
use smg_services::admin as pb;
use smg_services::admin::admin_client::AdminClient;
use smg_store::{ClusterStore, StoreError};
use tokio::net::TcpListener;
use tonic::metadata::MetadataValue;
use tonic::transport::Channel;
use tonic::{Code, Request, Status};
use tonic_health::pb::health_client::HealthClient;
use tonic_health::pb::{HealthCheckRequest, health_check_response::ServingStatus};
use tonic_reflection::pb::v1::ServerReflectionRequest;
use tonic_reflection::pb::v1::server_reflection_client::ServerReflectionClient;
use tonic_reflection::pb::v1::server_reflection_request::MessageRequest;
use tonic_reflection::pb::v1::server_reflection_response::MessageResponse;
use uuid::Uuid;

use super::error::ApiError;
use crate::testing::{FakeEngine, Plane};

async fn serve(router: Router) -> Channel {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move { axum::serve(listener, router).await });
    Channel::from_shared(format!("http://{address}")).unwrap().connect().await.unwrap()
}

async fn client(plane: &Plane) -> AdminClient<Channel> {
    AdminClient::new(serve(plane.plane.router()).await)
}

fn codes(status: &Status) -> (Code, &str, &str) {
    let text = |name: &str| status.metadata().get(name).map_or("", |value| value.to_str().unwrap());
    (status.code(), text("smg-code"), text("smg-outcome"))
}

fn prefill(url: &str) -> state::WorkerSpec {
    state::WorkerSpec {
        url: url.to_owned(),
        worker_type: state::WorkerType::Prefill as i32,
        priority: 50,
        cost: 1.0,
        api_key: Some("hush".to_owned()),
        max_connection_attempts: 20,
        ..state::WorkerSpec::default()
    }
}

#[tokio::test]
async fn what_rest_does_grpc_does_on_the_same_fleet() {
    let plane = Plane::start();
    let mut client = client(&plane).await;
    let engine = FakeEngine::vllm().await;
    let rehearsal = pb::ChangeOptions { dry_run: true, ..pb::ChangeOptions::default() };
    let create = |options| pb::CreateWorkerRequest { options, spec: Some(prefill(&engine.url)) };
    let rehearsed = client.create_worker(create(Some(rehearsal))).await.unwrap().into_inner();
    assert!(rehearsed.dry_run && plane.store.local().workers().count() == 0);
    let key = pb::ChangeOptions { idempotency_key: Uuid::now_v7().to_string(), ..pb::ChangeOptions::default() };
    let created = client.create_worker(create(Some(key.clone()))).await.unwrap().into_inner();
    let again = client.create_worker(create(Some(key))).await.unwrap().into_inner();
    assert_eq!(again.revision, created.revision, "it is the same change");
    plane.until("registered", |state| state.workers().all(|worker| worker.facts.is_some())).await;
    let listed = client.list_workers(pb::ListWorkersRequest::default()).await.unwrap().into_inner();
    let spec = listed.workers[0].spec.clone().unwrap();
    assert_eq!((spec.url.as_str(), spec.api_key), (engine.url.as_str(), None), "keys are never shown");
    let id = Uuid::from_slice(&listed.workers[0].id).unwrap().to_string();

    let intent = state::Intent::Cordoned as i32;
    let cordon = pb::SetWorkerIntentRequest { options: None, id: id.clone(), intent };
    let cordoned = client.set_worker_intent(cordon).await.unwrap().into_inner();
    let Some(pb::change_response::Object::Worker(worker)) = cordoned.object else { panic!("no worker") };
    assert_eq!(worker.intent, intent);
    let shown = client.get_worker(pb::GetWorkerRequest { stale: false, id: id.clone() }).await.unwrap().into_inner();
    assert!(shown.idle && shown.busy_gateways.is_empty());
    assert_eq!(plane.get(&format!("/workers/{id}")).await.body["intent"], "cordoned");

    let document = Some(state::PolicyDocument { policy: Some("random".to_owned()), ..Default::default() });
    let put = pb::PutPolicyRequest { options: None, model: "default".to_owned(), document };
    client.put_policy(put).await.unwrap();
    assert_eq!(plane.get("/fleet/policies/default").await.body["document"], json!({"policy": "random"}));
    let audit = client.list_audit(pb::ListAuditRequest::default()).await.unwrap().into_inner();
    let actions: Vec<&str> = audit.records.iter().map(|record| record.action.as_str()).collect();
    assert_eq!(actions, ["put_policy", "set_intent", "create_worker"]);
    let matrix = client.get_pairing(pb::PairingRequest::default()).await.unwrap().into_inner();
    assert_eq!(serde_json::from_str::<serde_json::Value>(&matrix.json).unwrap()["models"][0]["prefills"], 1);
    let admission = client.get_admission(pb::ReadRequest::default()).await.unwrap().into_inner();
    assert_eq!((admission.workers.len(), admission.gateways.len()), (0, 0), "only gated decode workers have slots");
    let cluster = client.get_cluster(pb::ReadRequest::default()).await.unwrap().into_inner();
    assert_eq!(cluster.cluster_id, plane.store.local().cluster_id().to_string());
    let mut parts = client.backup(pb::BackupRequest {}).await.unwrap().into_inner();
    let mut bytes = Vec::new();
    while let Some(part) = parts.next().await {
        bytes.extend(part.unwrap().data);
    }
    assert_eq!(crate::backup::verify(&bytes).unwrap().revision, plane.store.local().revision());
}

#[tokio::test]
async fn errors_carry_the_codes_and_outcomes_of_rest() {
    let plane = Plane::start();
    let mut client = client(&plane).await;
    let absent = pb::DeletePolicyRequest { options: None, model: "absent".to_owned() };
    let status = client.delete_policy(absent.clone()).await.unwrap_err();
    assert_eq!(codes(&status), (Code::NotFound, "POLICY_NOT_FOUND", "did_not_happen"));
    let get = pb::GetWorkerRequest { stale: false, id: "7".to_owned() };
    assert_eq!(codes(&client.get_worker(get).await.unwrap_err()).0, Code::InvalidArgument);
    let options = Some(pb::ChangeOptions { expected_revision: Some(9), ..pb::ChangeOptions::default() });
    let document = Some(state::PolicyDocument::default());
    let put = pb::PutPolicyRequest { options, model: "m".to_owned(), document };
    assert_eq!(
        codes(&client.put_policy(put).await.unwrap_err()),
        (Code::Aborted, "REVISION_CONFLICT", "did_not_happen")
    );
    plane.store.fail(vec![StoreError::Unavailable("no leader".into())]);
    let status = client.delete_policy(absent).await.unwrap_err();
    assert_eq!(codes(&status), (Code::Unavailable, "CONTROL_PLANE_UNAVAILABLE", "did_not_happen"));
    plane.store.fail(vec![StoreError::Failed("disk".into())]);
    let get = client.put_policy(pb::PutPolicyRequest {
        model: "m".to_owned(),
        document: Some(Default::default()),
        options: None,
    });
    assert_eq!(codes(&get.await.unwrap_err()), (Code::Unavailable, "STORE_FAILED", "did_not_happen"));
    let key = pb::ChangeOptions { idempotency_key: Uuid::now_v7().to_string(), ..pb::ChangeOptions::default() };
    let token = pb::CreateTokenRequest { options: Some(key), name: "ada".to_owned(), role: state::Role::Admin as i32 };
    let mut bearer = String::from("Bearer ");
    bearer.push_str(&client.create_token(token.clone()).await.unwrap().into_inner().secret);
    let mut again = Request::new(token);
    again.metadata_mut().insert("authorization", MetadataValue::try_from(bearer).unwrap());
    let status = client.create_token(again).await.unwrap_err();
    assert_eq!(codes(&status), (Code::AlreadyExists, "ALREADY_HAPPENED", "happened"));
}

#[test]
fn what_may_have_happened_has_a_status_of_its_own() {
    let status = Status::from(ApiError::Store(StoreError::Unknown("the leader fell silent".into())));
    assert_eq!(codes(&status), (Code::Unknown, "OUTCOME_UNKNOWN", "unknown"));
}

#[tokio::test]
async fn a_call_needs_the_role_that_its_request_to_rest_needs() {
    let secret = "a-viewer's-token-of-some-length";
    let plane = Plane::with(|options| {
        let viewer = StartupToken { name: "v".to_owned(), role: Role::Viewer, hash: TokenHash::of(secret) };
        options.access.startup_tokens = vec![viewer];
    });
    let mut client = client(&plane).await;
    let nobody = client.list_workers(pb::ListWorkersRequest::default()).await.unwrap_err();
    assert_eq!(codes(&nobody).0, Code::Unauthenticated);
    fn as_viewer<T>(message: T, secret: &str) -> Request<T> {
        let mut request = Request::new(message);
        let bearer = MetadataValue::try_from(format!("Bearer {secret}")).unwrap();
        request.metadata_mut().insert("authorization", bearer);
        request
    }
    let who = client.who_am_i(as_viewer(pb::WhoAmIRequest {}, secret)).await.unwrap().into_inner();
    assert_eq!((who.name.as_str(), who.role()), ("v", state::Role::Viewer));
    client.list_workers(as_viewer(pb::ListWorkersRequest::default(), secret)).await.unwrap();
    let remove = as_viewer(pb::RemoveWorkerRequest::default(), secret);
    assert_eq!(
        codes(&client.remove_worker(remove).await.unwrap_err()),
        (Code::PermissionDenied, "FORBIDDEN", "did_not_happen")
    );
    let tokens = pb::WatchRequest { list: pb::watch_request::List::Tokens as i32, ..pb::WatchRequest::default() };
    assert_eq!(client.watch(as_viewer(tokens, secret)).await.unwrap_err().code(), Code::PermissionDenied);
    let backup = client.backup(as_viewer(pb::BackupRequest {}, secret)).await.unwrap_err();
    assert_eq!(backup.code(), Code::PermissionDenied);
}

#[tokio::test]
async fn every_call_has_a_role() {
    let descriptors = smg_services::ADMIN_DESCRIPTORS;
    let set: prost_types::FileDescriptorSet = prost::Message::decode(descriptors).unwrap();
    let services = set.file.iter().flat_map(|file| &file.service).filter(|service| service.name() == "Admin");
    let methods: Vec<&str> = services.flat_map(|service| &service.method).map(|method| method.name()).collect();
    assert!(methods.len() > 20, "{methods:?}");
    for method in methods {
        assert!(super::rpc::as_rest(method).is_some(), "{method}");
    }
}

#[tokio::test]
async fn a_list_is_followed_over_grpc() {
    let plane = Plane::start();
    let mut client = client(&plane).await;
    plane.call("PUT", "/fleet/policies/a", Some(json!({}))).await;
    let list = pb::watch_request::List::Policies as i32;
    let watch = pb::WatchRequest { list, ..pb::WatchRequest::default() };
    let mut steps = client.watch(watch).await.unwrap().into_inner();
    let first = steps.next().await.unwrap().unwrap();
    assert_eq!((first.policies.len(), first.policies[0].model.as_str()), (1, "a"));
    plane.call("DELETE", "/fleet/policies/a", None).await;
    let second = steps.next().await.unwrap().unwrap();
    assert_eq!((second.deleted, second.end.as_str()), (vec!["a".to_owned()], ""));
}

#[tokio::test]
async fn tools_find_out_what_is_there_and_whether_it_serves() {
    let plane = Plane::start();
    let channel = serve(plane.plane.router()).await;
    let mut health = HealthClient::new(channel.clone());
    let check = || HealthCheckRequest { service: "smg.admin.v1.Admin".to_owned() };
    let mut status = ServingStatus::ServiceUnknown;
    for _ in 0..1_000 {
        match health.check(check()).await {
            Ok(answer) if answer.get_ref().status() == ServingStatus::Serving => {
                status = ServingStatus::Serving;
                break;
            }
            _ => tokio::time::sleep(std::time::Duration::from_millis(10)).await,
        }
    }
    assert_eq!(status, ServingStatus::Serving);
    let mut reflection = ServerReflectionClient::new(channel);
    let ask = ServerReflectionRequest {
        host: String::new(),
        message_request: Some(MessageRequest::ListServices(String::new())),
    };
    let mut answers = reflection.server_reflection_info(futures::stream::iter([ask])).await.unwrap().into_inner();
    let answer = answers.next().await.unwrap().unwrap();
    let Some(MessageResponse::ListServicesResponse(list)) = answer.message_response else { panic!("{answer:?}") };
    let names: Vec<&str> = list.service.iter().map(|service| service.name.as_str()).collect();
    assert!(names.contains(&"smg.admin.v1.Admin") && names.contains(&"grpc.health.v1.Health"), "{names:?}");
}
