//! Fetches chunks from other hosts. Owns the order in which sources are asked.
//!
//! Invariant: at any time at most two sources are asked for a chunk. A host that does not answer costs one deadline.

use super::host::{Host, Sent, Stage, WIDTH};
use super::{Peers, count};
use crate::serve::cache::Brought;
use futures_util::future::{BoxFuture, Either, FutureExt, select};
use reqwest::redirect::Policy;
use reqwest::{Client, retry};
use spillway_image::digests::ChunkDigest;
use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;
use tokio_rustls::rustls::ClientConfig;

/// Longest time until a connection is there, unless that to another source is longer.
const CONNECT: Duration = Duration::from_secs(1);
/// Time after which a connection is closed that nobody uses: shorter than the other side's.
const IDLE: Duration = Duration::from_secs(20);

/// A chunk of an image.
#[derive(Clone, Copy)]
pub struct Wanted {
    /// Digest of the image.
    pub root: ChunkDigest,
    /// Chunks that it has.
    pub chunks: u32,
    /// Number of the chunk.
    pub chunk: u32,
    /// Its digest.
    pub digest: ChunkDigest,
    /// Its length, in bytes.
    pub len: u64,
}

/// What came.
pub enum Came {
    /// From a host.
    Peer(Sent),
    /// This from the store.
    Store(Brought),
}

/// A request to a host.
type Get<'a> = BoxFuture<'a, Option<Sent>>;

enum Turn {
    Sent(Sent),
    /// The host that was asked last has nothing.
    Nothing,
    /// It has not sent it in time.
    Late,
}

/// What connects to hosts. Another source is never asked before the least time.
pub fn connections(config: ClientConfig, least: Duration) -> Result<Client, String> {
    Client::builder()
        .use_preconfigured_tls(config)
        .https_only(true)
        .http1_only()
        .no_proxy()
        .redirect(Policy::none())
        .retry(retry::never())
        .connect_timeout(CONNECT.max(least))
        .pool_idle_timeout(IDLE)
        .pool_max_idle_per_host(WIDTH)
        .tcp_nodelay(true)
        .build()
        .map_err(|e| format!("no client for peers: {e}"))
}

impl Peers {
    /// The hosts to ask for a chunk before the store, in order, and whether each may fetch it. The second owner leaves the store to
    /// the first one, which takes from the second only what that has: so one of them asks the store.
    fn sources(&self, wanted: &Wanted) -> Vec<(Arc<Host>, bool)> {
        let owners = self.owners(wanted);
        match owners.iter().position(Option::is_none) {
            Some(0) => {
                let others = owners.into_iter().flatten();
                others.filter(|host| host.has(wanted)).map(|host| (host, false)).collect()
            }
            Some(rank) => owners.into_iter().take(rank).flatten().map(|host| (host, true)).collect(),
            None => owners.into_iter().flatten().map(|host| (host, true)).collect(),
        }
    }

    /// Whether this host is an owner of a chunk.
    pub fn is_owner(&self, wanted: &Wanted) -> bool {
        self.owners(wanted).iter().any(Option::is_none)
    }

    /// Brings a chunk from another host or, if none has it soon, from the store.
    pub async fn fetch(&self, wanted: &Wanted, store: impl Future<Output = Brought>) -> Came {
        match self.race(wanted, store).await {
            // Neither the owners nor the store have it: anybody else will do.
            Came::Store(Brought::Damaged(why)) => match self.ask_anybody(wanted).await {
                Some(sent) => self.counted(sent),
                None => Came::Store(Brought::Damaged(why)),
            },
            Came::Peer(sent) => self.counted(sent),
            came => came,
        }
    }

    fn counted(&self, sent: Sent) -> Came {
        count(&self.counts.peer_chunks, 1);
        count(&self.counts.peer_bytes, sent.bytes.len() as u64);
        Came::Peer(sent)
    }

    async fn race(&self, wanted: &Wanted, store: impl Future<Output = Brought>) -> Came {
        let sources = self.sources(wanted);
        let mut earlier: Option<Get<'_>> = None;
        for (host, may_fetch) in &sources {
            let stage = Arc::new(Stage::default());
            let of_request = Arc::clone(&stage);
            let mut now = async move { host.get(wanted, *may_fetch, &of_request).await }.boxed();
            match turn(&mut earlier, &mut now, stage.is_late(host.hedge())).await {
                Turn::Sent(sent) => return Came::Peer(sent),
                Turn::Nothing => {}
                Turn::Late => earlier = Some(now),
            }
        }
        let Some(earlier) = earlier else { return Came::Store(store.await) };
        match select(earlier, pin!(store)).await {
            Either::Left((Some(sent), _)) => Came::Peer(sent),
            Either::Left((None, store)) => Came::Store(store.await),
            Either::Right((Brought::Damaged(why), earlier)) => {
                earlier.await.map_or(Came::Store(Brought::Damaged(why)), Came::Peer)
            }
            Either::Right((brought, _)) => Came::Store(brought),
        }
    }

    /// Asks the hosts that have said that they have a chunk.
    async fn ask_anybody(&self, wanted: &Wanted) -> Option<Sent> {
        for host in self.hosts().iter().filter(|host| host.is_live() && host.has(wanted)) {
            let sent = host.get(wanted, false, &Stage::default()).await;
            if sent.is_some() {
                return sent;
            }
        }
        None
    }
}

/// Waits for a request, and for the one before it, until one has the chunk or the newer one has nothing or is late.
async fn turn(earlier: &mut Option<Get<'_>>, now: &mut Get<'_>, is_late: impl Future<Output = ()>) -> Turn {
    let mut is_late = pin!(is_late);
    loop {
        let of_earlier = async {
            match earlier {
                Some(earlier) => earlier.await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            biased;
            sent = &mut *now => return sent.map_or(Turn::Nothing, Turn::Sent),
            sent = of_earlier => match sent {
                Some(sent) => return Turn::Sent(sent),
                None => *earlier = None,
            },
            () = &mut is_late => return Turn::Late,
        }
    }
}
