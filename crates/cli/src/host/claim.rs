//! `spillway machine claim`, `renew` and `release`. Owns what becomes of a claim whose command does not end well.
//!
//! Invariant: a claim that nobody could be told of is given up.

use super::Daemon;
use super::machine::{failed, wait};
use super::words::label;
use crate::error::{Exit, Failure};
use clap::Args;
use spillway_api::client::{Client, ClientError, query};
use spillway_api::{ClaimRenewal, MachineDetails, Name, NewClaim, parse_ttl};
use std::time::{Duration, Instant};

/// How long spillwayd itself waits for the machine: as long as it does it notices a client that dies.
const HELD: u64 = 25;

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
    /// How long, such as 90s, 30m, 2h or 7d, or none: until it is released [default: as the catalog says, else spillwayd]
    #[arg(long, value_name = "TIME", value_parser = parse_ttl)]
    ttl: Option<u32>,
    /// Who has the machine [default: the user, or the name of the token]
    #[arg(long, value_name = "NAME")]
    owner: Option<String>,
    /// A label of the claim; may be given more than once
    #[arg(long = "label", value_name = "KEY=VALUE", value_parser = label)]
    labels: Vec<(Name, String)>,
    /// A name for this claim: asked again with it within a day, the same machine is given and no other
    #[arg(long, value_name = "KEY")]
    key: Option<String>,
    /// Take one that is not ready yet if none is, starting it if need be, and wait until it is
    #[arg(long)]
    wait: bool,
    /// With --wait: how long at most
    #[arg(long, value_name = "SECONDS", requires = "wait", default_value_t = 300)]
    timeout: u64,
}

/// Options of `machine renew`.
#[derive(Debug, Args)]
pub struct Renew {
    /// The machine
    name: Name,
    /// How long from now on, or none: until it is released [default: as long as it was to last when it was claimed]
    #[arg(long, value_name = "TIME", value_parser = parse_ttl)]
    ttl: Option<u32>,
    /// Only if it still has the claim of this id, which 'claim' printed
    #[arg(long, value_name = "ID")]
    claim: Option<String>,
}

impl Claim {
    /// Claims a machine and says which.
    pub fn run(self, daemon: &Daemon, client: &mut Client) -> Result<(), Failure> {
        let mut machine = self.ask(client)?;
        let told = self.wait(client, &mut machine).and_then(|()| tell(daemon, &machine));
        if told.is_err() {
            // Whoever asked does not get it.
            let _ = release(client, &machine.machine.name, claim_of(&machine));
        }
        told
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
            // With the connection spillwayd gives the claim up, but for one with a key, which may be asked for again.
            Err(interrupted @ ClientError::Interrupted { .. }) => {
                if let Some(machine) = key.and_then(|key| client.post_once(&path, Some(key), &asked).ok()) {
                    let machine: MachineDetails = machine;
                    let _ = release(client, &machine.machine.name, claim_of(&machine));
                }
                Err(interrupted.into())
            }
            answer => Ok(answer?),
        }
    }

    fn wait(&self, client: &Client, machine: &mut MachineDetails) -> Result<(), Failure> {
        if !self.wait {
            return Ok(());
        }
        wait(client, machine, Instant::now() + Duration::from_secs(self.timeout))?;
        failed(machine)
    }
}

/// Name, address and the claim's id. Refuses if nobody reads them.
fn tell(daemon: &Daemon, machine: &MachineDetails) -> Result<(), Failure> {
    let is_read = daemon.shows(machine, |machine| {
        let address = machine.status.address.as_deref().unwrap_or("-");
        format!("{}\t{address}\t{}\n", machine.machine.name, claim_of(machine).unwrap_or("-"))
    })?;
    match is_read {
        true => Ok(()),
        false => {
            let name = &machine.machine.name;
            Err(Failure::new(Exit::Create, format!("nobody reads which machine it is: {name} is given back")))
        }
    }
}

impl Renew {
    /// Lets a claim last longer and says how long.
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

/// Ends this claim, or whichever there is.
pub fn release(client: &Client, name: &Name, claim: Option<&str>) -> Result<MachineDetails, Failure> {
    let which = claim.map(|id| query([("claim", id.to_owned())])).unwrap_or_default();
    Ok(client.delete(&format!("/v1/machines/{name}/claim{which}"))?)
}

/// The id of the claim that a machine has.
fn claim_of(machine: &MachineDetails) -> Option<&str> {
    machine.claim.as_ref().map(|claim| claim.id.as_str())
}

/// Who has a machine, since when and how long, in a line.
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
