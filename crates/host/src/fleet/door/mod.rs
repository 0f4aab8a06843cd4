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
pub use client::{HostClient, HostClientError, Presence, SELF};
pub use identity::{CertificateDigest, Identity};
pub use listener::{FleetListener, PendingMember};
pub use members::{Member, Members};
pub use pool::HostBody;
#[cfg(test)]
pub(crate) use verify::client_config as test_client_config;

use spillway_api::{FleetReach, Name};
use std::time::Duration;

/// Time in which another host must answer that this one asks itself.
pub const REACH: Duration = Duration::from_secs(2);
/// Time in which another host must say whether it reaches a third one, which may take it [`REACH`].
const ANSWER: Duration = Duration::from_secs(4);

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

    /// Asks a host, which may be this one, whether it reaches a third one. None: it has not said so or so, because it was not asked, has not
    /// answered, or does not know that host itself.
    pub async fn ask_about(&self, about: &Name, by: &Name) -> Option<bool> {
        if *by == self.host {
            let presence = self.client.look(about, REACH).await.ok()?;
            return Some(!matches!(presence, Presence::Silent(_)));
        }
        let path = format!("/v1/fleet/reach/{about}");
        self.client.get::<FleetReach>(by, &path, ANSWER).await.ok().map(|answer| answer.reaches)
    }
}

#[cfg(test)]
mod tests;
