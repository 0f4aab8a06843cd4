//! Clients of the fleet, and what they know together: which request has which machine.
//!
//! Invariant: a client takes a machine off the list before it asks for its release.

use serde_json::Value;
use spillway_testkit::Rng;
use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Longest time until a request has an end. Daemons are stopped for seconds, and a client asks again.
const PATIENCE: Duration = Duration::from_secs(180);

/// An answer of a daemon.
#[derive(Debug)]
pub struct Answer {
    pub status: u16,
    pub body: Value,
}

/// What has become of requests.
#[derive(Clone, Copy, Debug, Default)]
pub struct Outcomes {
    pub claimed: u64,
    pub refused: u64,
    pub repeated: u64,
    pub ended: u64,
}

/// Machines that clients have, by host and name: the id of the request.
#[derive(Default)]
pub struct Registry(Mutex<(BTreeMap<String, String>, Outcomes)>);

impl Registry {
    pub fn outcomes(&self) -> Outcomes {
        self.state().1
    }

    fn state(&self) -> MutexGuard<'_, (BTreeMap<String, String>, Outcomes)> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn hold(&self, claim: &Value, id: &str) {
        let before = self.state().0.insert(place(claim), id.to_owned());
        assert_eq!(before, None, "{} is claimed twice: for {id}, too: {claim:#}", place(claim));
    }

    fn count(&self, count: impl FnOnce(&mut Outcomes)) {
        count(&mut self.state().1);
    }
}

fn place(claim: &Value) -> String {
    format!("{}/{}", claim["host"].as_str().unwrap(), claim["machine"]["name"].as_str().unwrap())
}

/// Sends a request. `None`: there is no answer. With `cut` the client goes away so long after it has sent the request.
pub fn ask(
    socket: &Path,
    method: &str,
    path: &str,
    headers: &str,
    body: &str,
    cut: Option<Duration>,
) -> Option<Answer> {
    let mut stream = UnixStream::connect(socket).ok()?;
    stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    let length = body.len();
    let request = format!(
        "{method} {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\n{headers}content-length: {length}\r\n\r\n{body}"
    );
    stream.write_all(request.as_bytes()).ok()?;
    if let Some(cut) = cut {
        std::thread::sleep(cut);
        return None;
    }
    let mut answer = String::new();
    stream.read_to_string(&mut answer).ok()?;
    let (head, body) = answer.split_once("\r\n\r\n")?;
    let status = head.split(' ').nth(1)?.parse().ok()?;
    Some(Answer { status, body: serde_json::from_str(body).ok()? })
}

/// Asks for a machine that is ready. `first`: nobody has sent a request with this id before.
pub fn claim(socket: &Path, id: &str, first: bool) -> Option<Answer> {
    claim_for(socket, id, first, None)
}

fn claim_for(socket: &Path, id: &str, first: bool, cut: Option<Duration>) -> Option<Answer> {
    let path = format!("/v1/fleet/catalogs/runner/claims?first={first}");
    ask(socket, "POST", &path, &format!("idempotency-key: {id}\r\n"), "{}", cut)
}

/// Releases the machine of a claim through any daemon, which must answer.
pub fn release(socket: &Path, claim: &Value) {
    let answer = try_release(socket, claim).unwrap();
    assert_eq!(answer.status, 200, "{:#}", answer.body);
}

fn try_release(socket: &Path, claim: &Value) -> Option<Answer> {
    let (host, machine) = (claim["host"].as_str().unwrap(), claim["machine"]["name"].as_str().unwrap());
    let id = claim["claim"].as_str().unwrap();
    let path = format!("/v1/fleet/hosts/{host}/api/v1/machines/{machine}/claim?claim={id}");
    ask(socket, "DELETE", &path, "", "", None)
}

/// Claims a machine, has it for a while, and releases it.
pub fn one_claim(sockets: &[PathBuf], registry: &Registry, rng: &mut Rng) {
    let id = format!("{:016x}-{:016x}", rng.next_u64(), rng.next_u64());
    let Some(claim) = settle(sockets, registry, rng, &id) else { return };
    registry.hold(&claim, &id);
    std::thread::sleep(Duration::from_millis(rng.below(30)));
    if rng.below(5) == 0 {
        again(&any(sockets, rng), &id, |answer| {
            assert_eq!(answer.status, 200, "{id}: {:#}", answer.body);
            let same = |of: &Value| (of["host"].clone(), of["claim"].clone(), of["fence"].clone());
            assert_eq!(same(&answer.body), same(&claim), "one request has two claims: {id}");
        });
    }
    assert_eq!(registry.state().0.remove(&place(&claim)).as_ref(), Some(&id));
    let begun = Instant::now();
    loop {
        match try_release(&any(sockets, rng), &claim) {
            // The answer to the first request to release it was lost.
            Some(Answer { status: 200 | 409, .. }) => break,
            Some(Answer { status: 503, .. }) | None => {}
            Some(other) => panic!("{id} is not released: {other:?}"),
        }
        assert!(begun.elapsed() < PATIENCE, "{id} is not released");
        std::thread::sleep(Duration::from_millis(100));
    }
    if rng.below(10) == 0 {
        again(&any(sockets, rng), &id, |answer| {
            assert_eq!(answer.status, 409, "{id} has ended, and is made again: {:#}", answer.body);
            registry.count(|count| count.ended += 1);
        });
    }
}

fn any(sockets: &[PathBuf], rng: &mut Rng) -> PathBuf {
    sockets[rng.below(sockets.len() as u64) as usize].clone()
}

/// Repeats a request once. Without an answer, nothing is known.
fn again(socket: &Path, id: &str, check: impl FnOnce(Answer)) {
    if let Some(answer) = claim(socket, id, false)
        && answer.status != 503
    {
        check(answer);
    }
}

/// Asks until it is known whether the request has a machine.
fn settle(sockets: &[PathBuf], registry: &Registry, rng: &mut Rng, id: &str) -> Option<Value> {
    let begun = Instant::now();
    let mut first = true;
    loop {
        assert!(begun.elapsed() < PATIENCE, "{id} has no end");
        let cut = (rng.below(10) == 0).then(|| Duration::from_millis(rng.below(20)));
        match claim_for(&any(sockets, rng), id, first, cut) {
            Some(Answer { status: 200, body }) => {
                registry.count(|count| count.claimed += 1);
                return Some(body);
            }
            // No host has one now: this is an end, too.
            Some(Answer { status: 409, body }) if body["code"] == "exhausted" => {
                registry.count(|count| count.refused += 1);
                std::thread::sleep(Duration::from_millis(100));
                return None;
            }
            Some(Answer { status: 409 | 503, .. }) | None => {
                registry.count(|count| count.repeated += 1);
                first = false;
                std::thread::sleep(Duration::from_millis(50));
            }
            Some(other) => panic!("{id}: {other:?}"),
        }
    }
}
