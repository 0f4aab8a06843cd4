//! How the daemons of a fleet talk to each other: over TLS, with certificates whose digests they have written to etcd. Owns the
//! identity of this host and the list of the others; decides nothing about machines.
//!
//! Invariant: nothing is answered to, and nothing is sent to, a program without the private key of a member's certificate.

mod caller;
mod client;
mod identity;
mod listener;
mod members;
mod pool;
mod verify;

pub use caller::{CALLER_HEADER, MemberPeer, caller_value};
pub use client::{HostClient, HostClientError};
pub use identity::{CertificateDigest, Identity};
pub use listener::{FleetListener, PendingMember};
pub use members::{Member, Members};
pub use pool::HostBody;
#[cfg(test)]
pub(crate) use verify::client_config as test_client_config;

use spillway_api::Name;
use std::net::SocketAddr;

/// Settings of the listener for other hosts.
#[derive(Clone, Debug)]
pub struct FleetDoorSettings {
    /// Name of this host in the fleet.
    pub host: Name,
    /// Address to listen on.
    pub listen: SocketAddr,
}

/// What the API's routes need of the fleet.
pub struct FleetDoor {
    /// Name of this host in the fleet.
    pub host: Name,
    /// Identity of this process: a new one at each start.
    pub instance: String,
    /// The hosts of the fleet, this one included.
    pub members: Members,
    /// Client of the other hosts.
    pub client: HostClient,
}

impl FleetDoor {
    /// Makes the client of the other hosts. Nobody is a member until [`Members::replace`] says so.
    pub fn new(host: Name, identity: &Identity) -> FleetDoor {
        let members = Members::default();
        let client = HostClient::new(identity, members.clone());
        FleetDoor { host, instance: uuid::Uuid::new_v4().to_string(), members, client }
    }
}

#[cfg(test)]
mod tests;
