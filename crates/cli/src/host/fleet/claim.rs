//! `spillway fleet claim`, `renew` and `release`. Owns the repeats of a claim whose answer was lost.
//!
//! Invariant: a claim that could not be reported is released, unless another run may use it; the error says how to end one that lasts. Only
//! a request with an id that was made here, and that was not sent before, is sent as a first one.

use super::FLEET;
use crate::error::{Exit, Failure};
use crate::host::Daemon;
use crate::host::claim::{claim_of, late, release, undo, unread};
use crate::host::machine::{failed, wait};
use crate::host::words::label;
use crate::output;
use clap::Args;
use spillway_api::client::{Client, ClientError, query};
use spillway_api::{ClaimRenewal, ErrorCode, FleetClaim, MachineDetails, Name, NewClaim, parse_ttl};
use std::fmt;
use std::str::FromStr;
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::time::{Duration, Instant};

/// How long the daemon itself waits for the machine.
const HELD: u64 = 25;
/// How long a request is repeated whose answer was lost: a host counts as lost after 45 s.
const REPEATS: Duration = Duration::from_secs(90);
/// Time until a request is repeated.
const PAUSE: Duration = Duration::from_secs(1);
/// A wait that is shorter is not announced.
const SOON: Duration = Duration::from_secs(2);

/// Options of `fleet claim`.
#[derive(Debug, Args)]
pub struct FleetClaimOptions {
    /// The catalog
    catalog: Name,
    /// Duration of the claim, such as 90s, 30m, 2h or 7d, or none: until it is released [default: the catalog's, else
    /// that of the host's spillwayd]
    #[arg(long, value_name = "TIME", value_parser = parse_ttl)]
    ttl: Option<u32>,
    /// Owner of the claim [default: the name of the token, or the number of the user, such as 'uid 1000']
    #[arg(long, value_name = "NAME")]
    owner: Option<String>,
    /// A label of the claim; may be given more than once
    #[arg(long = "label", value_name = "KEY=VALUE", value_parser = label)]
    labels: Vec<(Name, String)>,
    /// Id of the request, 1 to 128 visible ASCII characters. If a request with it has claimed a machine, that one is returned; a new claim
    /// needs a new id [default: a random one]. A claim that an earlier request has made is not undone
    #[arg(long, value_name = "KEY")]
    key: Option<String>,
    /// If no machine is ready, take one that is off or starts, start it, and return before it is ready
    #[arg(long)]
    any: bool,
    /// If no machine is ready, take one that is off or starts, and wait until it is ready. While no machine is free, wait for one
    #[arg(long)]
    wait: bool,
    /// With --wait: longest wait
    #[arg(long, value_name = "SECONDS", requires = "wait", default_value_t = 300)]
    timeout: u64,
}

/// A machine of the fleet: `HOST/MACHINE`.
#[derive(Clone, Debug, PartialEq, Eq)]
struct FleetMachine {
    host: Name,
    machine: Name,
}

impl FromStr for FleetMachine {
    type Err = String;

    fn from_str(text: &str) -> Result<FleetMachine, String> {
        let (host, machine) =
            text.split_once('/').ok_or("it is HOST/MACHINE, as 'fleet claim' has printed it")?;
        let name = |text: &str| text.parse::<Name>().map_err(|e| e.to_string());
        Ok(FleetMachine { host: name(host)?, machine: name(machine)? })
    }
}

impl fmt::Display for FleetMachine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.host, self.machine)
    }
}

/// Options of `fleet renew`.
#[derive(Debug, Args)]
pub struct FleetRenew {
    /// Host and machine, as 'fleet claim' has printed them
    #[arg(value_name = "HOST/MACHINE")]
    machine: FleetMachine,
    /// Duration from now on, or none: until it is released [default: as long as when it was claimed]
    #[arg(long, value_name = "TIME", value_parser = parse_ttl)]
    ttl: Option<u32>,
    /// Only if the machine still has the claim of this id, which 'claim' printed
    #[arg(long, value_name = "ID")]
    claim: Option<String>,
}

/// Options of `fleet release`.
#[derive(Debug, Args)]
pub struct FleetRelease {
    /// Host and machine, as 'fleet claim' has printed them
    #[arg(value_name = "HOST/MACHINE")]
    machine: FleetMachine,
    /// Only if the machine still has the claim of this id, which 'claim' printed
    #[arg(long, value_name = "ID")]
    claim: Option<String>,
}

/// What is done after a request has failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Next {
    /// It is sent again, as it was: it has certainly claimed nothing.
    Again,
    /// It is sent again as one that may have been sent before.
    Repeat,
    /// The command fails.
    Fail,
}

/// Decides what follows from an error. `is_sent`: an earlier request with this id may have claimed a machine.
fn next(error: &ClientError, waits: bool, is_sent: bool) -> Next {
    match error {
        ClientError::Broken { .. } => Next::Repeat,
        ClientError::Refused(refusal) if refusal.code == ErrorCode::Unavailable => Next::Repeat,
        ClientError::Refused(refusal) if refusal.code == ErrorCode::Exhausted && waits => Next::Again,
        ClientError::Connect { .. } if is_sent => Next::Repeat,
        _ => Next::Fail,
    }
}

impl FleetClaimOptions {
    /// Claims a machine and prints where it is.
    pub fn run(self, daemon: &Daemon, client: &mut Client) -> Result<(), Failure> {
        let key = match &self.key {
            Some(key) => key.clone(),
            None => random_id()?,
        };
        let until = Instant::now() + if self.wait { Duration::from_secs(self.timeout) } else { REPEATS };
        // Before anything is claimed: what fails here leaves nothing.
        interruptible(client)?;
        let mut there = daemon.client()?;
        interruptible(&mut there)?;
        let waiting = self.announce(&key);
        let mut claim = self.ask(daemon, client, &key, until)?;
        let waited = self.wait(&there.through_to(claim.host.clone()), &mut claim, until);
        drop(waiting);
        let told = waited.and_then(|()| tell(daemon, &claim));
        told.map_err(|failure| self.give_up(daemon, &claim, failure))
    }

    /// Says once on standard error what is waited for, unless the result is dropped soon.
    fn announce(&self, key: &str) -> Sender<()> {
        let (waiting, ended) = mpsc::channel();
        let text = match self.wait {
            true => format!(
                "no machine of {} is ready: waiting for one, at most {} s (--timeout)",
                self.catalog, self.timeout
            ),
            false => format!(
                "the request {key} is not answered yet: it is repeated for {} s at most",
                REPEATS.as_secs()
            ),
        };
        let unless =
            self.key.as_ref().map_or("", |_| ", unless an earlier request with this key has made it");
        std::thread::spawn(move || {
            if ended.recv_timeout(SOON) == Err(RecvTimeoutError::Timeout) {
                output::complain("notice", &format!("{text}; Ctrl-C undoes the claim{unless}"));
            }
        });
        waiting
    }

    fn ask(
        &self,
        daemon: &Daemon,
        client: &Client,
        key: &str,
        until: Instant,
    ) -> Result<FleetClaim, Failure> {
        let labels = self.labels.iter().cloned().collect();
        let any = self.any || self.wait;
        let asked = NewClaim { ttl_seconds: self.ttl, any, owner: self.owner.clone(), labels };
        let (mut first, mut may_have_claimed) = (self.is_first(), false);
        loop {
            let error = match client.post_once(&self.path(first, self.held()), Some(key), &asked) {
                Ok(claim) => return Ok(claim),
                Err(interrupted @ ClientError::Interrupted { .. }) => {
                    return Err(self.interrupted(daemon, key, &asked, interrupted.into()));
                }
                Err(error) => error,
            };
            may_have_claimed = may_claim(&error).unwrap_or(may_have_claimed);
            match next(&error, self.wait, !first) {
                Next::Fail => return Err(refused(error, may_have_claimed, key)),
                _ if Instant::now() + PAUSE >= until => return Err(refused(error, may_have_claimed, key)),
                Next::Repeat => first = false,
                Next::Again => {}
            }
            std::thread::sleep(PAUSE);
        }
    }

    /// Seconds that the daemon holds the answer back until the machine is ready. With a key of the user the first answer comes at once: it says
    /// whether another run uses the claim, which must be known when a signal comes.
    fn held(&self) -> u64 {
        if self.wait && self.key.is_none() { self.timeout.min(HELD) } else { 0 }
    }

    /// Whether the request was certainly not sent before: nobody else knows an id that was made here.
    fn is_first(&self) -> bool {
        self.key.is_none()
    }

    /// Path of the request, which the daemon holds back for so many seconds until the machine is ready.
    fn path(&self, first: bool, held: u64) -> String {
        let first = first.then(|| ("first", "true".to_owned()));
        let queried = query(first.into_iter().chain([("wait", held.to_string())]));
        format!("{FLEET}/catalogs/{}/claims{queried}", self.catalog)
    }

    /// Releases what an interrupted request has claimed, unless another run may use it. The failure says what has become of it.
    fn interrupted(&self, daemon: &Daemon, key: &str, asked: &NewClaim, failure: Failure) -> Failure {
        let found = match daemon.client() {
            Ok(client) => match client.post_once(&self.path(false, 0), Some(key), asked) {
                Ok(claim) => return self.give_up(daemon, &claim, failure),
                Err(error) if is_certain(&error) => {
                    return Failure::new(failure.exit, format!("{failure}; nothing is claimed"));
                }
                Err(error) => error.to_string(),
            },
            Err(error) => error.message,
        };
        let unknown = format!("it is not known whether the request {key} has claimed a machine ({found})");
        let how = format!("to end its claim, run the same command with --key {key}, and release the machine");
        Failure::new(Exit::Unavailable, format!("{failure}; {unknown}: {how}"))
    }

    /// Releases a claim that the user does not get, unless an earlier request with the key of the user has made it. Adds to the failure what has become of it.
    fn give_up(&self, daemon: &Daemon, claim: &FleetClaim, failure: Failure) -> Failure {
        let (place, name, id) = (place(claim).to_string(), &claim.machine.machine.name, &claim.claim);
        let how = format!("release it with 'spillway fleet release {place} --claim {id}'");
        match &self.key {
            Some(_) if claim.is_repeated && claim_of(&claim.machine) != Some(id) => failure,
            Some(key) if claim.is_repeated => {
                let stays = format!(
                    "an earlier request with the key {key} has made it, and another run may use it: to end it, {how}"
                );
                Failure::new(failure.exit, format!("{failure}; the claim of {place} stays, because {stays}"))
            }
            _ => {
                let how = format!("{how}, or run the same command with --key {} to get it", claim.request);
                let client = daemon.client().map(|client| client.through_to(claim.host.clone()));
                undo(client, name, id, &place, &how, failure)
            }
        }
    }

    fn wait(&self, there: &Client, claim: &mut FleetClaim, until: Instant) -> Result<(), Failure> {
        if !self.wait {
            return Ok(());
        }
        wait(there, &mut claim.machine, until).map_err(|failure| late(failure, self.timeout))?;
        claim.address.clone_from(&claim.machine.status.address);
        failed(&claim.machine)?;
        let why = match () {
            () if claim_of(&claim.machine) != Some(&claim.claim) => {
                "its claim has ended while it was waited for"
            }
            () if !claim.machine.status.ready => "it was stopped while it was waited for",
            () => return Ok(()),
        };
        Err(Failure::new(Exit::Refused, format!("{}: {why}", place(claim))))
    }
}

fn interruptible(client: &mut Client) -> Result<(), Failure> {
    let cannot = |e| Failure::new(Exit::Internal, format!("signals cannot be waited for: {e}"));
    client.interruptible().map_err(cannot)
}

/// Whether a refusal says that there is no claim of the request.
fn is_certain(error: &ClientError) -> bool {
    let ClientError::Refused(refusal) = error else { return false };
    matches!(
        refusal.code,
        ErrorCode::Exhausted | ErrorCode::Conflict | ErrorCode::NotFound | ErrorCode::Invalid
    )
}

/// Whether a machine may be claimed after a request with this error. `None`: as before it, because it was not carried out.
fn may_claim(error: &ClientError) -> Option<bool> {
    match error {
        error if is_certain(error) => Some(false),
        ClientError::Broken { .. } => Some(true),
        ClientError::Refused(refusal) => {
            let is_open =
                matches!(refusal.code, ErrorCode::Unavailable | ErrorCode::Internal | ErrorCode::Damaged);
            is_open.then_some(true)
        }
        _ => None,
    }
}

/// The request has failed. If it may have claimed a machine, the failure names its id: nobody can find the claim without it.
fn refused(error: ClientError, may_have_claimed: bool, key: &str) -> Failure {
    let failure = Failure::from(error);
    if !may_have_claimed || failure.message.contains(&format!("--key {key}")) {
        return failure;
    }
    let again =
        format!("if the request {key} has claimed a machine, the same command with --key {key} returns it");
    Failure::new(failure.exit, format!("{failure}; {again}"))
}

fn place(claim: &FleetClaim) -> FleetMachine {
    FleetMachine { host: claim.host.clone(), machine: claim.machine.machine.name.clone() }
}

/// Makes the id of a request.
fn random_id() -> Result<String, Failure> {
    let file = "/proc/sys/kernel/random/uuid";
    let cannot = |e| Failure::new(Exit::Internal, format!("{file}: {e}: give --key"));
    Ok(std::fs::read_to_string(file).map_err(cannot)?.trim().to_owned())
}

/// Prints host and name, address and the claim's id. Fails if the output cannot be written.
fn tell(daemon: &Daemon, claim: &FleetClaim) -> Result<(), Failure> {
    let is_read = daemon.shows(claim, |claim| {
        let address = claim.address.as_deref().unwrap_or("-");
        format!("{}\t{address}\t{}\n", place(claim), claim.claim)
    })?;
    match is_read {
        true => Ok(()),
        false => Err(unread()),
    }
}

impl FleetRenew {
    /// Renews a claim and prints its duration.
    pub fn run(self, daemon: &Daemon) -> Result<(), Failure> {
        let which = self.claim.map(|id| query([("claim", id)])).unwrap_or_default();
        let path = format!("/v1/machines/{}/claim{which}", self.machine.machine);
        let client = daemon.client()?.through_to(self.machine.host.clone());
        let renewed: MachineDetails = client.put(&path, &ClaimRenewal { ttl_seconds: self.ttl })?;
        daemon.show(&renewed, |renewed| {
            let left = renewed.claim.as_ref().and_then(|claim| claim.left_seconds);
            let until = left.map_or("until it is released".into(), |left| format!("for {left} s"));
            format!("{} is claimed {until}\n", self.machine)
        })
    }
}

impl FleetRelease {
    /// Releases a machine.
    pub fn run(self, daemon: &Daemon) -> Result<(), Failure> {
        let client = daemon.client()?.through_to(self.machine.host.clone());
        let released = release(&client, &self.machine.machine, self.claim.as_deref())?;
        daemon.show(&released, |_| format!("{} is released\n", self.machine))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::FromArgMatches;
    use spillway_api::Problem;

    #[test]
    fn a_machine_of_the_fleet_has_a_host() {
        let machine: FleetMachine = "host-b/runner-host-b-004".parse().unwrap();
        assert_eq!((machine.host.as_str(), machine.machine.as_str()), ("host-b", "runner-host-b-004"));
        assert_eq!(machine.to_string(), "host-b/runner-host-b-004");
        for wrong in ["runner", "/runner", "host-b/", "a/b/c", "A/b"] {
            assert!(wrong.parse::<FleetMachine>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_request_is_repeated_if_it_may_have_claimed() {
        let refused = |code| ClientError::Refused(Problem::new(code, "why"));
        let broken = ClientError::Broken { at: "x".into(), why: "gone".into() };
        let connect =
            || ClientError::Connect { at: "x".into(), source: std::io::ErrorKind::NotFound.into(), hint: "" };
        for (error, waits, is_sent, then) in [
            (broken, false, false, Next::Repeat),
            (refused(ErrorCode::Unavailable), false, false, Next::Repeat),
            (refused(ErrorCode::Exhausted), true, false, Next::Again),
            (refused(ErrorCode::Exhausted), false, false, Next::Fail),
            (refused(ErrorCode::Conflict), true, true, Next::Fail),
            (connect(), true, false, Next::Fail),
            (connect(), false, true, Next::Repeat),
        ] {
            assert_eq!(next(&error, waits, is_sent), then, "{error}");
        }
    }

    #[test]
    fn only_an_id_that_was_made_here_is_sent_as_a_first_one() {
        let options = |arguments: &[&str]| {
            let command = FleetClaimOptions::augment_args(clap::Command::new("claim"));
            let matches = command.try_get_matches_from(["claim", "runner"].iter().chain(arguments)).unwrap();
            FleetClaimOptions::from_arg_matches(&matches).unwrap()
        };
        let path = |first| options(&[]).path(first, 25);
        assert_eq!(path(true), "/v1/fleet/catalogs/runner/claims?first=true&wait=25");
        assert_eq!(path(false), "/v1/fleet/catalogs/runner/claims?wait=25");
        assert!(options(&[]).is_first() && !options(&["--key", "job-1"]).is_first());
    }

    #[test]
    fn ids_are_random() {
        assert!(random_id().unwrap().len() == 36 && random_id().unwrap() != random_id().unwrap());
    }
}
