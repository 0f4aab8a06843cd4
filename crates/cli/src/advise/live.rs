//! `spillway advise --live`: how much RAM the machines of a catalog need, by the curves that go along with their disks.
//!
//! Invariant: a machine that cannot be asked is told of, and not left out in silence.

use super::ram;
use crate::error::Failure;
use crate::host::Daemon;
use crate::output;
use crate::table::percent;
use serde::Serialize;
use spillway_api::client::{Client, ClientError};
use spillway_api::{DiskCurve, List, MachineDetails, Name, Phase};
use spillway_control::bytes;
use std::fmt::Write;

/// What is looked at as the next step.
const STEP_BYTES: u64 = 256 << 20;

/// A machine's advice.
#[derive(Serialize)]
struct Advice {
    machine: Name,
    ram_bytes: u64,
    recommended_bytes: u64,
    zero_overflow_bytes: u64,
    knee_bytes: Option<u64>,
    seconds: f64,
    written_bytes: u64,
    /// Evicted at its limit, by the curve; and what 256 MiB more would have saved of that.
    overflow_write_bytes: u64,
    next_saves_bytes: u64,
    /// Until its write cache is full, if it fills on as it did since its worker began or it was reset. None: it does not fill.
    seconds_to_full: Option<u64>,
}

/// Advises for each machine of a catalog whose disk is served.
pub fn live(daemon: &Daemon, catalog: &Name, goal: f64) -> Result<(), Failure> {
    let client = daemon.client()?;
    let machines: List<MachineDetails> = client.list(&format!("/v1/machines?catalog={catalog}"))?;
    let mut all = Vec::new();
    for machine in machines.items.iter().filter(|machine| machine.status.phase == Phase::Running) {
        let name = &machine.machine.name;
        let ram_bytes = machine.status.run.as_ref().and_then(|run| run.ram_bytes);
        let Some(ram_bytes) = ram_bytes else {
            output::complain("warning", &format!("{name} has no RAM tier: nothing is said of it"));
            continue;
        };
        match curve(&client, name, goal) {
            Ok(curve) => all.push(advice(name, ram_bytes, &curve)),
            Err(e) => output::complain("warning", &format!("{name}: {}", Failure::from(e).message)),
        }
    }
    let text = match daemon.json {
        true => format!("{:#}\n", serde_json::json!({ "catalog": catalog, "goal": goal, "machines": all })),
        false => table(catalog, goal, &all),
    };
    output::print(&text).map(drop)
}

fn curve(client: &Client, name: &Name, goal: f64) -> Result<DiskCurve, ClientError> {
    client.get(&format!("/v1/machines/{name}/curve?goal={goal}"))
}

fn advice(name: &Name, ram_bytes: u64, curve: &DiskCurve) -> Advice {
    let now = curve.overflow_write_bytes(ram_bytes);
    Advice {
        machine: name.clone(),
        ram_bytes,
        recommended_bytes: curve.recommended_bytes,
        zero_overflow_bytes: curve.zero_overflow_bytes,
        knee_bytes: curve.knee_bytes,
        seconds: curve.seconds,
        written_bytes: curve.written_bytes(),
        overflow_write_bytes: now,
        next_saves_bytes: now - curve.overflow_write_bytes(ram_bytes.saturating_add(STEP_BYTES)).min(now),
        seconds_to_full: curve.fill.seconds_to_full(),
    }
}

fn table(catalog: &Name, goal: f64, all: &[Advice]) -> String {
    if all.is_empty() {
        return format!("no machine of {catalog} runs that has a RAM tier\n");
    }
    let mut out = format!(
        "{:<16}{:>10}{:>12}{:>12}{:>12}{:>14}{:>14}{:>14}\n",
        "machine", "since", "written", "RAM tier", "absorbed", "recommended", "+256M saves", "time to full"
    );
    for one in all {
        let absorbed = percent(one.written_bytes.saturating_sub(one.overflow_write_bytes), one.written_bytes);
        let _ = writeln!(
            out,
            "{:<16}{:>10}{:>12}{:>12}{absorbed:>12}{:>14}{:>14}{:>14}",
            one.machine,
            time(one.seconds as u64),
            bytes(one.written_bytes),
            ram(one.ram_bytes),
            ram(one.recommended_bytes),
            bytes(one.next_saves_bytes),
            one.seconds_to_full.map_or("-".into(), time)
        );
    }
    let most = all.iter().map(|one| one.recommended_bytes).max().unwrap_or(0);
    let _ = writeln!(
        out,
        "\nwith ram_bytes = \"{}\" each of them absorbs {}% of what it has written since then; what it wrote before is not known",
        ram(most),
        (goal * 1e4).round() / 100.0
    );
    out
}

/// Seconds, for people.
fn time(seconds: u64) -> String {
    match seconds {
        0..120 => format!("{seconds} s"),
        120..7200 => format!("{} min", seconds / 60),
        7200..172_800 => format!("{} h", seconds / 3600),
        _ => format!("{} days", seconds / 86_400),
    }
}
