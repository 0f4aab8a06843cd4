//! A connection to one member of etcd. Owns what is asked of a member before it is used.
//!
//! Invariant: a member that is used had a leader when it was connected, and is etcd 3.4 or later.

use super::error::MemberFailure;
use super::health::Observation;
use super::request::{REQUEST_TIME, ask, failure};
use super::store::FleetStoreSettings;
use super::tls::read_options;
use etcd_client::{Client, ConnectOptions, KvClient, LeaseClient, WatchClient};
use std::error::Error;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;
use tokio::time::Instant;

/// Time for connecting to a member, with its first answer.
pub const CONNECT_TIME: Duration = Duration::from_secs(1);
/// Longest message that is taken from a member. etcd's own requests are limited to 1.5 MiB, and pages are made smaller until they fit.
const MOST_MESSAGE_BYTES: usize = 16 << 20;

/// A connection to a member.
pub struct Member {
    /// Its place in the address of the fleet.
    pub index: usize,
    /// Its address, `HOST:PORT`.
    pub address: String,
    /// The client of this connection alone. It demands that the member has a leader.
    client: Client,
    /// Set once the member has been left for another one.
    left: watch::Sender<bool>,
    /// When it was connected.
    connected: Instant,
}

impl Member {
    /// Connects to a member, and asks it what it is.
    ///
    /// # Errors
    /// It does not answer in time, or is none that can be used.
    pub async fn connect(
        settings: &Arc<FleetStoreSettings>,
        index: usize,
    ) -> Result<(Member, Observation), MemberFailure> {
        let address = settings.address.members[index].clone();
        let connecting = async {
            let mut client = connect(settings, &address).await?;
            let observation = Observation::new(&client.status().await.map_err(failure)?)?;
            Ok((client, observation))
        };
        let connected = tokio::time::timeout(CONNECT_TIME, connecting).await;
        let (client, observation) = connected.unwrap_or(Err(MemberFailure::Silent(CONNECT_TIME)))?;
        let (left, connected) = (watch::Sender::new(false), Instant::now());
        Ok((Member { index, address, client, left, connected }, observation))
    }

    /// For reading and writing records.
    pub fn records(&self) -> KvClient {
        self.client.kv_client().max_decoding_message_size(MOST_MESSAGE_BYTES)
    }

    /// For following records.
    pub fn watch(&self) -> WatchClient {
        self.client.watch_client().max_decoding_message_size(MOST_MESSAGE_BYTES)
    }

    /// For leases.
    pub fn leases(&self) -> LeaseClient {
        self.client.lease_client()
    }

    /// Asks it how it fares.
    ///
    /// # Errors
    /// It does not answer in time, or has become one that cannot be used.
    pub async fn observe(&self) -> Result<Observation, MemberFailure> {
        let mut maintenance = self.client.maintenance_client();
        Observation::new(&ask(REQUEST_TIME, maintenance.status()).await?)
    }

    /// Time since it was connected.
    pub fn age(&self) -> Duration {
        self.connected.elapsed()
    }

    /// Marks it as left. True, if it was not before.
    pub fn leave(&self) -> bool {
        !self.left.send_replace(true)
    }

    /// Whether it has been left.
    pub fn is_left(&self) -> bool {
        *self.left.borrow()
    }

    /// Waits until it is left.
    pub async fn until_left(&self) {
        // It cannot fail: the sender is ours.
        let _ = self.left.subscribe().wait_for(|left| *left).await;
    }
}

async fn connect(settings: &Arc<FleetStoreSettings>, address: &str) -> Result<Client, MemberFailure> {
    let options = ConnectOptions::new().with_connect_timeout(CONNECT_TIME).with_require_leader(true);
    let of_files = Arc::clone(settings);
    let options = tokio::task::spawn_blocking(move || {
        read_options(options, of_files.tls.as_ref(), of_files.user.as_ref())
    });
    let options = options.await.map_err(|why| MemberFailure::Unreachable(why.to_string()))??;
    let scheme = if settings.tls.is_some() { "https" } else { "http" };
    // With a user it asks for a token; without, nothing is sent yet.
    let client = Client::connect([format!("{scheme}://{address}")], Some(options)).await;
    client.map_err(|why| match (why, &settings.tls) {
        // The connection is not there yet: this is about what the files contain.
        (etcd_client::Error::TransportError(why), Some(tls)) => {
            let why = why.source().map_or_else(|| why.to_string(), ToString::to_string);
            MemberFailure::File(tls.suspect(), format!("cannot be used: {why}"))
        }
        (why, _) => failure(why),
    })
}
