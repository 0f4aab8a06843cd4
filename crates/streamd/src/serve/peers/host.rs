//! One other host. Owns what is known of it: whether it answers, how fast, what it has, and whether it has sent wrong bytes.
//!
//! Invariant: a host that does not answer is asked nothing but whether it is there, by one task, until it answers. No request waits
//! for a host that is known not to answer.

use super::client::Wanted;
use super::members::CertificateDigest;
use super::{Counts, MAY_FETCH, count};
use crate::serve::pace::Pace;
use reqwest::header::RETRY_AFTER;
use reqwest::{Client, Response, StatusCode, Url};
use spillway_image::digests::{ChunkDigest, OfParts, hex};
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};
use tokio::time::{sleep, timeout};

/// Requests to a host at a time.
pub const WIDTH: usize = 16;
/// Longest time of a whole request, which is longer than a host waits for the registry.
const WHOLE: Duration = Duration::from_secs(30);
/// Longest time between two parts of a chunk.
const PART: Duration = Duration::from_secs(2);
/// Longest time between the beginning and the end of a chunk.
const BODY: Duration = Duration::from_secs(10);
/// Time after which another source is asked, too, if a request has not got its place or an answer that has begun is not whole.
const LATE: Duration = Duration::from_secs(2);
/// Longest time of a look whether a host is there.
const LOOK: Duration = Duration::from_secs(2);
/// Pauses between looks at a host that is not there: the first, and the longest.
const PAUSES: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(30));
/// Time for which a host is left alone that has sent wrong bytes.
const LEFT_ALONE: Duration = Duration::from_secs(600);
/// Longest time for which a host is not asked after it has said that it has sent as much as it may.
const MOST_BUSY: Duration = Duration::from_secs(5);
/// Age at which it is asked again what a host has.
const HAVE_AGE: Duration = Duration::from_secs(5);
/// Age at which what a host has of an image is forgotten.
const HAVE_KEPT: Duration = Duration::from_secs(60);
/// Longest time of an answer that counts for the pace: the deadline is never longer than twice this time.
const MOST_COUNTED: Duration = Duration::from_secs(1);

/// The host.
pub struct Host {
    name: String,
    certificate: Option<CertificateDigest>,
    base: Url,
    client: Client,
    pace: Pace,
    places: Arc<Semaphore>,
    known: Mutex<Known>,
    counts: Arc<Counts>,
}

#[derive(Default)]
struct Known {
    /// A task looks whether it is there.
    is_looked_at: bool,
    is_away: bool,
    left_alone_until: Option<Instant>,
    busy_until: Option<Instant>,
    /// What it has of each image that was asked for.
    have: HashMap<ChunkDigest, Have>,
}

struct Have {
    asked: Instant,
    observed: Observed,
}

enum Observed {
    /// It has not answered yet.
    Unknown,
    /// It does not serve the image.
    Unserved,
    /// It has these: bit n of byte n / 8 is chunk n.
    Chunks(Vec<u8>),
}

/// A chunk that came.
pub struct Sent {
    /// Its content, which is right.
    pub bytes: Vec<u8>,
    /// The place of its request, which is taken until it was kept.
    pub place: OwnedSemaphorePermit,
}

/// How far a request has come.
#[derive(Default)]
pub struct Stage {
    asked: Notify,
    has_begun: AtomicBool,
}

impl Stage {
    /// Returns when the answer has not begun within this time, or when the request or the answer waits much longer.
    pub async fn is_late(&self, hedge: Duration) {
        // Too many are asking this host already, if that ends first.
        let _ = timeout(hedge.max(LATE), self.asked.notified()).await;
        sleep(hedge).await;
        if self.has_begun.load(Ordering::Acquire) {
            sleep(LATE).await;
        }
    }
}

/// A request that has no answer yet. If it is given up after the deadline, the host is looked at.
struct Waiting<'a> {
    host: &'a Arc<Host>,
    begun: Instant,
    is_answered: bool,
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        let passed = self.begun.elapsed();
        if !self.is_answered && passed >= self.host.hedge() {
            self.host.pace.took(passed.min(MOST_COUNTED));
            self.host.look_at();
        }
    }
}

impl Host {
    /// A host at an address, of which nothing is known; with a certificate, it is known by that. Another source is never asked before the
    /// least time.
    pub fn new(
        name: &str,
        certificate: Option<CertificateDigest>,
        client: Client,
        least: Duration,
        counts: Arc<Counts>,
    ) -> Result<Arc<Host>, String> {
        let base = Url::parse(name).ok().filter(|url| url.scheme() == "https" && url.path() == "/");
        let base =
            base.ok_or_else(|| format!("--peer {name}: it is no address such as https://HOST:PORT"))?;
        let (pace, places, known) = (Pace::new(least), Arc::new(Semaphore::new(WIDTH)), Mutex::default());
        Ok(Arc::new(Host { name: name.into(), certificate, base, client, pace, places, known, counts }))
    }

    /// Its address.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The certificate that it is known by.
    pub fn certificate(&self) -> Option<CertificateDigest> {
        self.certificate
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    fn url(&self, path: &str) -> Url {
        let mut url = self.base.clone();
        url.set_path(path);
        url
    }

    /// Time without an answer after which another source is asked, too.
    pub fn hedge(&self) -> Duration {
        self.pace.hedge()
    }

    /// Whether it answers and is not left alone.
    pub fn is_live(&self) -> bool {
        let known = self.known();
        !known.is_away && known.left_alone_until.is_none_or(|until| until <= Instant::now())
    }

    fn is_busy(&self) -> bool {
        self.known().busy_until.is_some_and(|until| until > Instant::now())
    }

    /// Whether it may serve an image: it has not said that it does not.
    pub fn may_serve(self: &Arc<Host>, wanted: &Wanted) -> bool {
        self.have(wanted, |observed| !matches!(observed, Observed::Unserved))
    }

    /// Whether it has said that it has a chunk.
    pub fn has(self: &Arc<Host>, wanted: &Wanted) -> bool {
        let at = wanted.chunk as usize;
        self.have(wanted, |observed| match observed {
            Observed::Chunks(bits) => bits.get(at / 8).is_some_and(|byte| byte >> (at % 8) & 1 == 1),
            Observed::Unknown | Observed::Unserved => false,
        })
    }

    /// What is known of an image. If that is old it is asked for again, which nobody waits for.
    fn have<T>(self: &Arc<Host>, wanted: &Wanted, look: impl FnOnce(&Observed) -> T) -> T {
        let mut known = self.known();
        let is_old = known.have.get(&wanted.root).is_none_or(|have| have.asked.elapsed() > HAVE_AGE);
        if is_old && !known.is_away {
            known.have.retain(|_, have| have.asked.elapsed() < HAVE_KEPT);
            let unknown = || Have { asked: Instant::now(), observed: Observed::Unknown };
            known.have.entry(wanted.root).or_insert_with(unknown).asked = Instant::now();
            let (host, root, chunks) = (Arc::clone(self), wanted.root, wanted.chunks);
            tokio::spawn(async move { host.ask_what_it_has(root, chunks).await });
        }
        look(known.have.get(&wanted.root).map_or(&Observed::Unknown, |have| &have.observed))
    }

    async fn ask_what_it_has(self: Arc<Host>, root: ChunkDigest, chunks: u32) {
        let len = chunks.div_ceil(8) as usize;
        let asked = async {
            let response = self.client.get(self.url(&format!("have/{}", hex(&root)))).send().await?;
            match response.status() {
                StatusCode::OK => Ok(body(response, len, |_| ()).await?.filter(|bits| bits.len() == len)),
                _ => Ok(None),
            }
        };
        let answered: Result<_, Failed> = timeout(WHOLE, asked).await.unwrap_or(Err(Failed));
        match answered {
            Ok(bits) => {
                let observed = bits.map_or(Observed::Unserved, Observed::Chunks);
                let have = Have { asked: Instant::now(), observed };
                self.known().have.insert(root, have);
            }
            Err(Failed) => self.look_at(),
        }
    }

    /// Gets a chunk. None: it has not got it, or not now, or what it sent was of no use.
    pub async fn get(self: &Arc<Host>, wanted: &Wanted, may_fetch: bool, stage: &Stage) -> Option<Sent> {
        let place = Arc::clone(&self.places).acquire_owned().await.ok()?;
        // What was true when the request began to wait for its place need not be so any more.
        if !self.is_live() || self.is_busy() {
            return None;
        }
        stage.asked.notify_one();
        match timeout(WHOLE, self.ask(wanted, may_fetch, stage)).await {
            Ok(Ok(bytes)) => bytes.map(|bytes| Sent { bytes, place }),
            Ok(Err(Failed)) | Err(_) => {
                self.look_at();
                None
            }
        }
    }

    async fn ask(
        self: &Arc<Host>,
        wanted: &Wanted,
        may_fetch: bool,
        stage: &Stage,
    ) -> Result<Option<Vec<u8>>, Failed> {
        let name = hex(&wanted.digest);
        let mut request = self.client.get(self.url(&format!("{}/{name}", &name[..4])));
        if may_fetch {
            request = request.header(MAY_FETCH, "1");
        }
        let mut waiting = Waiting { host: self, begun: Instant::now(), is_answered: false };
        let answered = request.send().await;
        waiting.is_answered = true;
        let response = answered?;
        match response.status() {
            StatusCode::OK => self.pace.took(waiting.begun.elapsed().min(MOST_COUNTED)),
            StatusCode::SERVICE_UNAVAILABLE => {
                self.known().busy_until = Some(Instant::now() + retry_after(&response));
                return Ok(None);
            }
            _ => return Ok(None),
        }
        stage.has_begun.store(true, Ordering::Release);
        let (mut came, len) = (OfParts::default(), wanted.len as usize);
        // Compared while the rest is on its way.
        let bytes = timeout(BODY, body(response, len, |part| came.add(part))).await.map_err(|_| Failed)??;
        let right = bytes.filter(|bytes| bytes.len() == len && came.finish() == wanted.digest);
        if right.is_none() {
            self.leave_alone(&name);
        }
        Ok(right)
    }

    /// It has sent something else than the chunk of this digest.
    fn leave_alone(&self, digest: &str) {
        let mut known = self.known();
        let now = Instant::now();
        if known.left_alone_until.replace(now + LEFT_ALONE).is_none_or(|until| until <= now) {
            count(&self.counts.wrong_peers, 1);
            eprintln!(
                "spillway-streamd: the peer {} sent wrong bytes for the chunk {digest}. It is not asked for 10 minutes",
                self.name
            );
        }
    }

    /// Finds out whether it is there; until it is known, it counts as it did before.
    fn look_at(self: &Arc<Host>) {
        if !std::mem::replace(&mut self.known().is_looked_at, true) {
            let host = Arc::clone(self);
            tokio::spawn(async move { host.look().await });
        }
    }

    async fn look(&self) {
        let mut pause = PAUSES.0;
        let nothing = self.url(&format!("have/{}", hex(&[0; 32])));
        // Whatever it says, it answers.
        while !matches!(timeout(LOOK, self.client.head(nothing.clone()).send()).await, Ok(Ok(_))) {
            self.known().is_away = true;
            sleep(pause).await;
            pause = (pause * 2).min(PAUSES.1);
        }
        let mut known = self.known();
        if known.is_away {
            // It may have other chunks than before, and is asked at once.
            known.have.clear();
        }
        (known.is_looked_at, known.is_away) = (false, false);
    }
}

/// No answer, or only a part of one.
struct Failed;

impl From<reqwest::Error> for Failed {
    fn from(_: reqwest::Error) -> Failed {
        Failed
    }
}

/// The body of an answer; none if it has more bytes than this. Each part is told of when it comes.
async fn body(
    mut response: Response,
    most_bytes: usize,
    mut comes: impl FnMut(&[u8]),
) -> Result<Option<Vec<u8>>, Failed> {
    let mut bytes = Vec::with_capacity(most_bytes);
    while let Some(part) = timeout(PART, response.chunk()).await.map_err(|_| Failed)?? {
        if bytes.len() + part.len() > most_bytes {
            return Ok(None);
        }
        comes(&part);
        bytes.extend_from_slice(&part);
    }
    Ok(Some(bytes))
}

fn retry_after(response: &Response) -> Duration {
    let seconds = response.headers().get(RETRY_AFTER).and_then(|value| value.to_str().ok()?.parse().ok());
    Duration::from_secs(seconds.unwrap_or(1)).clamp(Duration::from_secs(1), MOST_BUSY)
}
