//! Other hosts with the same images: chunks are fetched from them before the registry is asked, and sent to them. Owns the list of
//! hosts.
//!
//! Invariants: a request is never passed on: what another host asks for comes from this cache, or from the registry. What another host
//! sends is compared with its digest before it is used.

mod client;
mod host;
mod owners;
mod server;
mod tls;
mod upload;

pub use client::{Came, Wanted};
pub use host::Sent;
pub use server::serve;

use host::Host;
use spillway_registry::serve::{CacheFigures, PeerOrder};
use std::net::TcpListener;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use upload::UploadLimit;

/// Header of a request of a host that does not have the chunk, to an owner: it may fetch the chunk from the registry. Without it,
/// only what is there is sent.
const MAY_FETCH: &str = "spillway-may-fetch";

/// What must be opened before the process gives up its rights.
pub struct Opened {
    listener: TcpListener,
    configs: tls::Configs,
}

/// The other hosts.
pub struct Peers {
    /// Address of this one, as the others know it.
    name: String,
    hosts: Vec<Arc<Host>>,
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
    let configs = tls::read(order)?;
    let failed = |e| format!("--peer-listen {}: {e}", order.listen);
    let listener = TcpListener::bind(order.listen).map_err(failed)?;
    listener.set_nonblocking(true).map_err(failed)?;
    Ok(Opened { listener, configs })
}

impl Opened {
    /// The hosts of the order, which must be the same, and what the server needs.
    ///
    /// # Errors
    /// For people: what of the order cannot be used, and why.
    pub fn begin(self, order: &PeerOrder) -> Result<(Arc<Peers>, server::Entrance), String> {
        let counts = Arc::new(Counts::default());
        let least = Duration::from_millis(order.hedge_milliseconds);
        let client = client::connections(self.configs.client, least)?;
        let others = order.hosts.iter().filter(|name| **name != order.name);
        let host = |name: &String| Host::new(name, client.clone(), least, Arc::clone(&counts));
        let hosts = others.map(host).collect::<Result<_, _>>()?;
        let upload = UploadLimit::new(order.upload_bytes_per_second);
        let peers = Arc::new(Peers { name: order.name.clone(), hosts, upload, counts });
        Ok((peers, server::Entrance::new(self.listener, self.configs.server)?))
    }
}

impl Peers {
    /// Owners of a chunk among the hosts that answer and, as far as is known, serve the image. `None` is this host.
    fn owners(&self, wanted: &Wanted) -> Vec<Option<Arc<Host>>> {
        let others = self.hosts.iter().filter(|host| host.is_live() && host.may_serve(wanted));
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
