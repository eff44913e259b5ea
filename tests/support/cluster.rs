//! A replicated control plane of real processes.
#![allow(clippy::unwrap_used)]

use serde_json::Value;

use super::*;

/// How long members may take to agree: a few elections and the copy of a log on a slow machine.
const AGREEMENT: Duration = Duration::from_secs(60);

/// A member's place, which outlives its process.
pub struct Place {
    /// Where it keeps its state.
    pub directory: tempfile::TempDir,
    port: u16,
    peer_port: u16,
    /// The address on which it serves other members, and from which it calls them.
    own: String,
    /// The host that it tells others, when that is another one.
    advertised: Option<String>,
}

impl Place {
    /// Free ports and an empty directory.
    pub fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        Self { directory, port: free_port(), peer_port: free_port(), own: "127.0.0.1".to_owned(), advertised: None }
    }

    /// A place at an address of its own, which others reach at another one.
    pub fn behind(advertised: &str, own: &str) -> Self {
        Self { own: own.to_owned(), advertised: Some(advertised.to_owned()), ..Self::new() }
    }

    /// The same addresses, and an empty directory.
    pub fn emptied(&self) -> Self {
        let (own, advertised) = (self.own.clone(), self.advertised.clone());
        Self { directory: tempfile::tempdir().unwrap(), own, advertised, ..*self }
    }

    /// Its port for the admin API and gateways.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Of the admin API and gateways.
    pub fn address(&self) -> String {
        format!("127.0.0.1:{}", self.port)
    }

    /// Where it serves other members.
    pub fn peer_listen(&self) -> String {
        format!("{}:{}", self.own, self.peer_port)
    }

    /// Where other members reach it.
    pub fn peer_address(&self) -> String {
        format!("{}:{}", self.advertised.as_ref().unwrap_or(&self.own), self.peer_port)
    }

    /// Starts the member without waiting for anything.
    pub fn start(&self, flags: &[&str]) -> Smg {
        let directory = self.directory.path().to_str().unwrap();
        let (listen, peer_listen) = (self.address(), self.peer_listen());
        let mut all = vec!["controlplane", "--insecure", "--data-dir", directory, "--listen", &listen];
        all.extend(["--peer-listen", &peer_listen, "--shutdown-grace-period-secs", "1"]);
        if let Some(host) = &self.advertised {
            all.extend(["--advertise", host]);
        }
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

/// What a member says of the cluster, if it answers soon.
pub async fn status(smg: &Smg) -> Option<Value> {
    let request = smg.client.get(format!("{}/fleet/cluster", smg.url)).timeout(Duration::from_secs(6));
    request.send().await.ok()?.json().await.ok()
}

/// The numbers of the voters.
pub fn voters(status: &Value) -> Vec<u64> {
    let members = status["members"].as_array().unwrap().iter();
    members.filter(|member| member["role"] != "learner").map(|member| member["node_id"].as_u64().unwrap()).collect()
}

/// Waits until every member is in contact with a leader that has so many voters, all of them well.
pub async fn until_voters(members: &[Smg], count: usize) {
    for smg in members {
        eventually_within(AGREEMENT, &format!("{count} voters"), || async {
            let status = status(smg).await?;
            let well = status["members"].as_array()?.iter().all(|member| member["health"] == "ok");
            (status["in_contact"] == true && well && voters(&status).len() == count).then_some(())
        })
        .await;
    }
}

/// Which member leads, as it says itself.
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
