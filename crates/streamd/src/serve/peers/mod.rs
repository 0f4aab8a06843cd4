//! Other hosts with the same images: chunks are fetched from them before the registry is asked, and sent to them. Owns the list of
//! hosts.
//!
//! Invariants: a request is never passed on: what another host asks for comes from this cache, or from the registry. What another host
//! sends is compared with its digest before it is used.

mod client;
mod host;
mod members;
mod owners;
mod server;
mod tls;
mod upload;

pub use client::{Came, Wanted};
pub use host::Sent;
pub use server::serve;

use host::Host;
use members::{CertificateDigest, Members};
use spillway_registry::serve::{
    CacheFigures, MOST_MEMBERS, MOST_MEMBERS_BYTES, PeerMember, PeerOrder, PeerTrust,
};
use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::io::Read;
use std::net::TcpListener;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tls::Tls;
use upload::UploadLimit;

/// Header of a request of a host that does not have the chunk, to an owner: it may fetch the chunk from the registry. Without it,
/// only what is there is sent.
const MAY_FETCH: &str = "spillway-may-fetch";

/// What must be opened before the process gives up its rights.
pub struct Opened {
    listener: TcpListener,
    tls: Tls,
    members: Members,
}

/// Hosts at a moment.
type Hosts = Arc<Vec<Arc<Host>>>;

/// The other hosts.
pub struct Peers {
    /// Address of this one, as the others know it.
    name: String,
    /// Replaced as a whole, and locked for moments only.
    hosts: Mutex<Hosts>,
    /// Who is let in, if the daemon says who that is.
    members: Option<Members>,
    tls: Tls,
    least_hedge: Duration,
    upload: UploadLimit,
    counts: Arc<Counts>,
}

/// What has happened, counted.
#[derive(Default)]
struct Counts {
    peer_chunks: AtomicU64,
    peer_bytes: AtomicU64,
    uploaded_chunks: AtomicU64,
    uploaded_bytes: AtomicU64,
    wrong_peers: AtomicU64,
    refused_uploads: AtomicU64,
}

fn count(counter: &AtomicU64, n: u64) {
    counter.fetch_add(n, Ordering::Relaxed);
}

/// Reads the files of an order, and listens at its address.
///
/// # Errors
/// For people: what of the order cannot be used, and why.
pub fn open(order: &PeerOrder) -> Result<Opened, String> {
    let members = Members::default();
    let tls = Tls::read(order, members.clone())?;
    let option = match order.trust {
        PeerTrust::Authority { .. } => "--peer-listen",
        PeerTrust::Members => "--fleet-peer-listen",
    };
    let failed = |e| format!("{option} {}: {e}", order.listen);
    let listener = TcpListener::bind(order.listen).map_err(failed)?;
    listener.set_nonblocking(true).map_err(failed)?;
    Ok(Opened { listener, tls, members })
}

impl Opened {
    /// The hosts of the order, which must be the same, and what the server needs.
    ///
    /// # Errors
    /// For people: what of the order cannot be used, and why.
    pub fn begin(self, order: &PeerOrder) -> Result<(Arc<Peers>, server::Entrance), String> {
        let counts = Arc::new(Counts::default());
        let least_hedge = Duration::from_millis(order.hedge_milliseconds);
        let (hosts, members) = match &order.trust {
            PeerTrust::Members => (Vec::new(), Some(self.members)),
            PeerTrust::Authority { hosts, .. } => {
                let client = client::connections(self.tls.client(None)?, least_hedge)?;
                let others = hosts.iter().filter(|name| **name != order.name);
                let host =
                    |name: &String| Host::new(name, None, client.clone(), least_hedge, Arc::clone(&counts));
                (others.map(host).collect::<Result<_, _>>()?, None)
            }
        };
        let server = self.tls.server()?;
        let peers = Peers {
            name: order.name.clone(),
            hosts: Mutex::new(Arc::new(hosts)),
            members: members.clone(),
            tls: self.tls,
            least_hedge,
            upload: UploadLimit::new(order.upload_bytes_per_second),
            counts,
        };
        Ok((Arc::new(peers), server::Entrance::new(self.listener, Arc::new(server), members)?))
    }
}

impl Peers {
    fn hosts(&self) -> Hosts {
        Arc::clone(&self.hosts.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Takes the list of members of a file. A member that is as it was keeps what is known of it.
    ///
    /// # Errors
    /// For people: the list is none, or nobody wants one.
    pub fn take_members(&self, file: File) -> Result<(), String> {
        let Some(admitted) = &self.members else {
            return Err("the hosts are those of the options: there is an authority".into());
        };
        let mut text = Vec::new();
        let read = file.take(MOST_MEMBERS_BYTES + 1).read_to_end(&mut text);
        read.map_err(|e| format!("the list of members: {e}"))?;
        if text.len() as u64 > MOST_MEMBERS_BYTES {
            return Err(format!("the list of members has more than {MOST_MEMBERS_BYTES} bytes"));
        }
        let members: Vec<PeerMember> =
            serde_json::from_slice(&text).map_err(|e| format!("the list of members: {e}"))?;
        if members.len() > MOST_MEMBERS {
            return Err(format!("the list has more than {MOST_MEMBERS} members"));
        }
        let before = self.hosts();
        let known: HashMap<_, _> =
            before.iter().map(|host| ((host.name(), host.certificate()), host)).collect();
        let (mut hosts, mut certificates) = (Vec::new(), HashSet::new());
        for PeerMember { address, certificate } in &members {
            // One that cannot be used keeps nobody from the others.
            let Some(certificate) = CertificateDigest::parse(certificate) else {
                eprintln!("spillway-streamd: the peer {address} has no certificate that can be used");
                continue;
            };
            certificates.insert(certificate);
            if *address == self.name {
                continue;
            }
            match known.get(&(address.as_str(), Some(certificate))) {
                Some(host) => hosts.push(Arc::clone(host)),
                None => match self.member(address, certificate) {
                    Ok(host) => hosts.push(host),
                    Err(why) => eprintln!("spillway-streamd: {why}"),
                },
            }
        }
        admitted.replace(certificates);
        *self.hosts.lock().unwrap_or_else(PoisonError::into_inner) = Arc::new(hosts);
        Ok(())
    }

    fn member(&self, address: &str, certificate: CertificateDigest) -> Result<Arc<Host>, String> {
        let client = client::connections(self.tls.client(Some(certificate))?, self.least_hedge)?;
        Host::new(address, Some(certificate), client, self.least_hedge, Arc::clone(&self.counts))
    }

    /// Owners of a chunk among the hosts that answer and, as far as is known, serve the image. `None` is this host.
    fn owners(&self, wanted: &Wanted) -> Vec<Option<Arc<Host>>> {
        let hosts = self.hosts();
        let others = hosts.iter().filter(|host| host.is_live() && host.may_serve(wanted));
        let hosts = others.map(|host| Some(Arc::clone(host))).chain([None]);
        let score = |host: &Option<Arc<Host>>| match host {
            Some(host) => owners::score(host.name(), &wanted.digest),
            None => owners::score(&self.name, &wanted.digest),
        };
        owners::owners(hosts, score)
    }

    /// What has happened. All other figures are 0.
    pub fn figures(&self) -> CacheFigures {
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        CacheFigures {
            peer_chunks: get(&self.counts.peer_chunks),
            peer_bytes: get(&self.counts.peer_bytes),
            uploaded_chunks: get(&self.counts.uploaded_chunks),
            uploaded_bytes: get(&self.counts.uploaded_bytes),
            wrong_peers: get(&self.counts.wrong_peers),
            refused_uploads: get(&self.counts.refused_uploads),
            ..CacheFigures::default()
        }
    }
}
