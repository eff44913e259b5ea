//! Gateways by the hundred: each keeps a real stream to some member, decodes what comes and acknowledges it.

use smg_fleet::wire;
use smg_services::sync::sync_client::SyncClient;
use smg_services::sync::{Ack, Heartbeat, Hello, Up, down, up};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;
use tokio_stream::wrappers::ReceiverStream;
use uuid::Uuid;

/// Running gateways; they end when this is dropped.
pub struct Gateways {
    acknowledged: Vec<watch::Receiver<u64>>,
    tasks: Vec<JoinHandle<()>>,
}

impl Drop for Gateways {
    fn drop(&mut self) {
        self.tasks.iter().for_each(JoinHandle::abort);
    }
}

impl Gateways {
    /// Waits until every one of them has acknowledged a revision.
    pub async fn until_all_have(&self, revision: u64) {
        for gateway in &self.acknowledged {
            gateway.clone().wait_for(|have| *have >= revision).await.unwrap();
        }
    }
}

/// Starts gateways, spread over the members.
pub fn start(addresses: &[String], count: usize) -> Gateways {
    let (mut acknowledged, mut tasks) = (Vec::new(), Vec::new());
    for n in 0..count {
        let (sender, receiver) = watch::channel(0);
        let address = addresses[n % addresses.len()].clone();
        acknowledged.push(receiver);
        tasks.push(tokio::spawn(async move {
            loop {
                follow(&address, n, &sender).await;
                tokio::time::sleep(std::time::Duration::from_millis(100)).await;
            }
        }));
    }
    Gateways { acknowledged, tasks }
}

/// One stream, until it breaks.
async fn follow(address: &str, n: usize, acknowledged: &watch::Sender<u64>) -> Option<()> {
    let client = SyncClient::connect(format!("http://{address}")).await.ok()?;
    let mut client = client.max_decoding_message_size(64 << 20);
    let (sender, receiver) = mpsc::channel(4);
    let hello = Hello {
        gateway_id: format!("figures-{n}"),
        process_id: Uuid::new_v4().as_bytes().to_vec(),
        have_history_id: Vec::new(),
        have_revision: 0,
        version: "figures".into(),
    };
    let send = |message: up::Message| sender.send(Up { message: Some(message) });
    send(up::Message::Hello(hello)).await.ok()?;
    let mut stream = client.subscribe(ReceiverStream::new(receiver)).await.ok()?.into_inner();
    let mut snapshot = Vec::new();
    while let Ok(Some(message)) = stream.message().await {
        let (nonce, revision) = match message.message {
            Some(down::Message::Full(part)) => {
                snapshot.extend_from_slice(&part.data);
                if !part.last {
                    continue;
                }
                wire::decode_snapshot(&std::mem::take(&mut snapshot)).unwrap();
                (part.nonce, part.revision)
            }
            Some(down::Message::Delta(message)) => {
                let delta = wire::delta_from_pb(message.delta.unwrap()).unwrap();
                (message.nonce, delta.to_revision)
            }
            Some(down::Message::Heartbeat(_)) => {
                send(up::Message::Heartbeat(Heartbeat::default())).await.ok()?;
                continue;
            }
            Some(down::Message::GoAway(_)) | None => return None,
        };
        send(up::Message::Ack(Ack { nonce, revision })).await.ok()?;
        acknowledged.send_replace(revision);
    }
    None
}
