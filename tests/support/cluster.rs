//! A replicated control plane of real processes.
#![allow(clippy::unwrap_used)]

use serde_json::Value;

use super::*;

/// A member's place, which outlives its process.
pub struct Place {
    /// Where it keeps its state.
    pub directory: tempfile::TempDir,
    port: u16,
    peer_port: u16,
}

impl Place {
    /// Free ports and an empty directory.
    pub fn new() -> Self {
        Self { directory: tempfile::tempdir().unwrap(), port: free_port(), peer_port: free_port() }
    }

    /// Its port for the admin API and gateways.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Of the admin API and gateways.
    pub fn address(&self) -> String {
        format!("127.0.0.1:{}", self.port)
    }

    /// Of other members.
    pub fn peer_address(&self) -> String {
        format!("127.0.0.1:{}", self.peer_port)
    }

    /// Starts the member without waiting for anything.
    pub fn start(&self, flags: &[&str]) -> Smg {
        let directory = self.directory.path().to_str().unwrap();
        let (listen, peer_listen) = (self.address(), self.peer_address());
        let mut all = vec!["controlplane", "--insecure", "--data-dir", directory, "--listen", &listen];
        all.extend(["--peer-listen", &peer_listen, "--shutdown-grace-period-secs", "1"]);
        all.extend(flags);
        Smg::spawn(&all, self.port, &[])
    }
}

/// Starts a cluster of voters: the first place founds it, the others join.
pub async fn cluster(places: &[Place]) -> Vec<Smg> {
    let founder = places[0].peer_address();
    let mut members = vec![places[0].start(&["--bootstrap"])];
    members.extend(places[1..].iter().map(|place| place.start(&["--join", &founder])));
    until_voters(&members, places.len()).await;
    members
}

/// What a member says of the cluster.
pub async fn status(smg: &Smg) -> Option<Value> {
    smg.client.get(format!("{}/fleet/cluster", smg.url)).send().await.ok()?.json().await.ok()
}

/// The numbers of the voters.
pub fn voters(status: &Value) -> Vec<u64> {
    let members = status["members"].as_array().unwrap().iter();
    members.filter(|member| member["role"] != "learner").map(|member| member["node_id"].as_u64().unwrap()).collect()
}

/// Waits until every member is in contact with a leader that has so many voters, all of them well.
pub async fn until_voters(members: &[Smg], count: usize) {
    for smg in members {
        eventually(&format!("{count} voters; log:\n{}", smg.log()), || async {
            let status = status(smg).await?;
            let well = status["members"].as_array()?.iter().all(|member| member["health"] == "ok");
            (status["in_contact"] == true && well && voters(&status).len() == count).then_some(())
        })
        .await;
    }
}

/// Which member leads, as the others see it.
pub async fn leader(members: &[Smg]) -> usize {
    eventually("a leader", || async {
        for (n, smg) in members.iter().enumerate() {
            if status(smg).await.is_some_and(|status| status["role"] == "leader" && status["in_contact"] == true) {
                return Some(n);
            }
        }
        None
    })
    .await
}
