//! `spillway machine claim`, `renew` and `release`. Owns what happens to a claim whose command fails, also one of a fleet.
//!
//! Invariant: a claim that could not be reported is released, or the error says how. One that another run may use is not released.

use super::Daemon;
use super::machine::{failed, wait};
use super::words::label;
use crate::error::{Exit, Failure};
use crate::output;
use clap::Args;
use spillway_api::client::{Client, ClientError, query};
use spillway_api::{ClaimRenewal, ErrorCode, MachineDetails, Name, NewClaim, parse_ttl};
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::time::{Duration, Instant};

/// How long the daemon itself waits for the machine. While it waits it notices that a client has died.
const HELD: u64 = 25;
/// A wait that is shorter is not announced.
const SOON: Duration = Duration::from_secs(1);

pub const CLAIM_EXAMPLES: &str = "\
Examples:
  name=$(spillway machine claim runner --ttl 1h --wait | cut -f1)
  spillway machine renew \"$name\"
  spillway machine release \"$name\"
  A job that may ask twice gets one machine:
    spillway machine claim runner --key \"job-$CI_JOB_ID\" --owner ci";

/// Options of `machine claim`.
#[derive(Debug, Args)]
pub struct Claim {
    /// The catalog
    catalog: Name,
    /// Duration of the claim, such as 90s, 30m, 2h or 7d, or none: until it is released [default: the catalog's, else
    /// spillwayd's]
    #[arg(long, value_name = "TIME", value_parser = parse_ttl)]
    ttl: Option<u32>,
    /// Owner of the claim [default: the name of the token, or the number of the user, such as 'uid 1000']
    #[arg(long, value_name = "NAME")]
    owner: Option<String>,
    /// A label of the claim; may be given more than once
    #[arg(long = "label", value_name = "KEY=VALUE", value_parser = label)]
    labels: Vec<(Name, String)>,
    /// Idempotency key: repeating the claim with it within a day returns the same machine. A claim with a key is not undone: another run
    /// may use it
    #[arg(long, value_name = "KEY")]
    key: Option<String>,
    /// Take a machine that is not ready yet if none is, start one if necessary, and wait until it is ready
    #[arg(long)]
    wait: bool,
    /// With --wait: longest wait
    #[arg(long, value_name = "SECONDS", requires = "wait", default_value_t = 300)]
    timeout: u64,
}

/// Options of `machine renew`.
#[derive(Debug, Args)]
pub struct Renew {
    /// The machine
    name: Name,
    /// Duration from now on, or none: until it is released [default: as long as when it was claimed]
    #[arg(long, value_name = "TIME", value_parser = parse_ttl)]
    ttl: Option<u32>,
    /// Only if the machine still has the claim of this id, which 'claim' printed
    #[arg(long, value_name = "ID")]
    claim: Option<String>,
}

impl Claim {
    /// Claims a machine and prints its name.
    pub fn run(self, daemon: &Daemon, client: &mut Client) -> Result<(), Failure> {
        let waiting = self.wait.then(|| self.announce());
        let mut machine = self.ask(client)?;
        let Some(claim) = claim_of(&machine).map(str::to_owned) else {
            return Err(Failure::new(
                Exit::Refused,
                format!("{}: its claim has ended", machine.machine.name),
            ));
        };
        let waited = self.wait(client, &mut machine, &claim);
        drop(waiting);
        let told = waited.and_then(|()| tell(daemon, &machine));
        told.map_err(|failure| self.give_up(daemon, &machine, &claim, failure))
    }

    /// Releases a claim that the user does not get, unless another run may use it. Adds to the failure what has become of it.
    fn give_up(&self, daemon: &Daemon, machine: &MachineDetails, claim: &str, failure: Failure) -> Failure {
        let name = &machine.machine.name;
        let how = format!("release it with 'spillway machine release {name} --claim {claim}'");
        match &self.key {
            None => undo(daemon.client(), name, claim, name.as_str(), &how, failure),
            Some(_) if claim_of(machine) != Some(claim) => failure,
            Some(key) => {
                let stays = format!("another run may use it with the key {key}: to end it, {how}");
                Failure::new(failure.exit, format!("{failure}; the claim of {name} stays, because {stays}"))
            }
        }
    }

    /// Says once on standard error what is waited for, unless the result is dropped soon.
    fn announce(&self) -> Sender<()> {
        let (waiting, ended) = mpsc::channel();
        let end = if self.key.is_none() { "undoes the claim" } else { "ends the wait, and the claim stays" };
        let text = format!(
            "no machine of {} is ready: waiting for one, at most {} s (--timeout); Ctrl-C {end}",
            self.catalog, self.timeout
        );
        std::thread::spawn(move || {
            if ended.recv_timeout(SOON) == Err(RecvTimeoutError::Timeout) {
                output::complain("notice", &text);
            }
        });
        waiting
    }

    fn ask(&self, client: &mut Client) -> Result<MachineDetails, Failure> {
        let labels = self.labels.iter().cloned().collect();
        let asked = NewClaim { ttl_seconds: self.ttl, any: self.wait, owner: self.owner.clone(), labels };
        let (path, key) = (format!("/v1/catalogs/{}/claims", self.catalog), self.key.as_deref());
        if !self.wait {
            return Ok(client.post_once(&path, key, &asked)?);
        }
        let cannot = |e| Failure::new(Exit::Internal, format!("signals cannot be waited for: {e}"));
        client.interruptible().map_err(cannot)?;
        let waits = query([("wait", self.timeout.min(HELD).to_string())]);
        match client.post_once(&format!("{path}{waits}"), key, &asked) {
            // When the connection ends the daemon releases the claim, unless it has a key.
            Err(interrupted @ ClientError::Interrupted { .. }) => {
                let failure = Failure::from(interrupted);
                let Some(key) = key else { return Err(failure) };
                let stays = "if it has claimed a machine, the claim stays, and the same command returns it";
                Err(Failure::new(failure.exit, format!("{failure} for the request {key}; {stays}")))
            }
            answer => Ok(answer?),
        }
    }

    fn wait(&self, client: &Client, machine: &mut MachineDetails, claim: &str) -> Result<(), Failure> {
        if !self.wait {
            return Ok(());
        }
        let until = Instant::now() + Duration::from_secs(self.timeout);
        wait(client, machine, until).map_err(|failure| late(failure, self.timeout))?;
        failed(machine)?;
        let name = &machine.machine.name;
        let why = match () {
            () if claim_of(machine) != Some(claim) => "its claim has ended while it was waited for",
            () if !machine.status.ready => "it was stopped while it was waited for",
            () => return Ok(()),
        };
        Err(Failure::new(Exit::Refused, format!("{name}: {why}")))
    }
}

/// Prints name, address and the claim's id. Fails if the output cannot be written.
fn tell(daemon: &Daemon, machine: &MachineDetails) -> Result<(), Failure> {
    let is_read = daemon.shows(machine, |machine| {
        let address = machine.status.address.as_deref().unwrap_or("-");
        format!("{}\t{address}\t{}\n", machine.machine.name, claim_of(machine).unwrap_or("-"))
    })?;
    match is_read {
        true => Ok(()),
        false => Err(unread()),
    }
}

/// Nobody reads the standard output.
pub fn unread() -> Failure {
    Failure::new(Exit::Create, "the name of the claimed machine cannot be written to standard output")
}

/// Adds the longest wait to the failure of one that has taken so long.
pub fn late(failure: Failure, timeout: u64) -> Failure {
    match failure.exit {
        Exit::Refused => Failure::new(failure.exit, format!("{failure} after {timeout} s (--timeout)")),
        _ => failure,
    }
}

/// Releases the claim of a machine that the user does not get, and adds to the failure what has become of it. `place` is what the user calls
/// the machine, and `how` how the user can end the claim. The client must not be interruptible: this is what a signal causes.
pub fn undo(
    client: Result<Client, Failure>,
    name: &Name,
    claim: &str,
    place: &str,
    how: &str,
    failure: Failure,
) -> Failure {
    let released =
        client.map_err(|e| e.message).and_then(|client| match release(&client, name, Some(claim)) {
            Ok(_) => Ok(format!("the claim of {place} is undone, and the machine is reset")),
            Err(ClientError::Refused(refusal)) if refusal.code == ErrorCode::Conflict => {
                Ok(format!("nothing is released: {}", refusal.detail))
            }
            Err(error) => Err(error.to_string()),
        });
    match released {
        Ok(end) => Failure::new(failure.exit, format!("{failure}; {end}")),
        Err(why) => {
            let lasts = format!("the claim of {place} may last, because it could not be undone ({why})");
            Failure::new(Exit::Unavailable, format!("{failure}; {lasts}: {how}"))
        }
    }
}

impl Renew {
    /// Renews a claim and prints its duration.
    pub fn run(self, daemon: &Daemon, client: &Client) -> Result<(), Failure> {
        let which = self.claim.map(|id| query([("claim", id)])).unwrap_or_default();
        let path = format!("/v1/machines/{}/claim{which}", self.name);
        let machine: MachineDetails = client.put(&path, &ClaimRenewal { ttl_seconds: self.ttl })?;
        daemon.show(&machine, |machine| {
            let left = machine.claim.as_ref().and_then(|claim| claim.left_seconds);
            let until = left.map_or("until it is released".into(), |left| format!("for {left} s"));
            format!("{} is claimed {until}\n", machine.machine.name)
        })
    }
}

/// Releases this claim, or the current one.
pub fn release(client: &Client, name: &Name, claim: Option<&str>) -> Result<MachineDetails, ClientError> {
    let which = claim.map(|id| query([("claim", id.to_owned())])).unwrap_or_default();
    client.delete(&format!("/v1/machines/{name}/claim{which}"))
}

/// Returns the id of a machine's claim.
pub fn claim_of(machine: &MachineDetails) -> Option<&str> {
    machine.claim.as_ref().map(|claim| claim.id.as_str())
}

/// Formats owner, start and duration of a claim in one line.
pub fn words(claim: &spillway_api::Claim) -> String {
    let since = claim.since.strftime("%Y-%m-%d %H:%M:%S");
    let left = claim.left_seconds.map_or("until it is released".into(), |left| format!("for {left} s still"));
    let labels: String = claim.labels.iter().map(|(key, value)| format!(", {key}={value}")).collect();
    format!("by {} since {since}, {left}{labels}", claim.owner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_claim_is_said_in_a_line() {
        let claim = serde_json::json!({ "id": "x", "owner": "ci", "labels": { "job": "7" }, "ttl_seconds": 60,
            "left_seconds": 5, "since": "2026-01-01T00:00:00Z" });
        let claim: spillway_api::Claim = serde_json::from_value(claim).unwrap();
        assert_eq!(words(&claim), "by ci since 2026-01-01 00:00:00, for 5 s still, job=7");
        let endless = spillway_api::Claim { left_seconds: None, ..claim };
        assert_eq!(words(&endless), "by ci since 2026-01-01 00:00:00, until it is released, job=7");
    }
}
