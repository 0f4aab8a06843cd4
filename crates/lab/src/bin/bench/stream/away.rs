//! Machines while the store does not answer: those whose image is all here must not notice, and others must be stopped and go on.

use super::Bench;
use super::host::{CATALOG, Host, HostSettings, IMAGE};
use super::report::Figures;
use super::site::far;
use anyhow::{Context, Result, ensure};
use serde_json::Value;
use spillway_testkit::process::wait_closely;
use spillway_testkit::store_proxy::{Away, StoreModel};
use std::time::{Duration, Instant};

const MACHINES: usize = 20;
/// How long the store is away.
const AWAY: Duration = Duration::from_secs(600);
const AWAY_QUICK: Duration = Duration::from_secs(60);
/// Times that a machine meets a store that is away.
const OUTAGES: usize = 3;
const SOON: Duration = Duration::from_secs(60);
const BOOT: Duration = Duration::from_secs(600);

/// The row S7.
pub fn away(bench: &Bench, figures: &mut Figures) -> Result<()> {
    let host = Host::new(&bench.site, HostSettings::default())?;
    host.import(IMAGE, "full")?;
    host.wait_whole(IMAGE)?;
    host.create_catalog(&bench.site, CATALOG, MACHINES)?;
    let names: Vec<_> = (1..=MACHINES).map(|n| format!("{CATALOG}-{n:03}")).collect();
    let begun = Instant::now();
    host.daemon().ask(&["machine", "start", "--catalog", CATALOG])?;
    wait_all(&host, &names)?;
    figures.add(
        "S7/boot",
        "20 machines at once with software emulation: all ready",
        "s",
        begun.elapsed().as_secs_f64(),
    );

    bench.site.store.set_model(gone())?;
    let begun = Instant::now();
    let time = if bench.options.quick { AWAY_QUICK } else { AWAY };
    let (mut resets, mut restarts) = (0.0, 0.0);
    for turn in 0.. {
        if begun.elapsed() >= time {
            break;
        }
        // Four at a time: as many as two cores boot in half a minute.
        let some: Vec<_> = (0..4).map(|n| names[(turn * 4 + n) % MACHINES].clone()).collect();
        for (n, name) in some.iter().enumerate() {
            if n % 2 == 0 {
                host.daemon().ask(&["machine", "reset", name])?;
                resets += 1.0;
            } else {
                host.daemon().ask(&["machine", "restart", name, "--force"])?;
                restarts += 1.0;
            }
        }
        wait_all(&host, &some)?;
    }
    figures.add("S7/away", "the store was away", "s", begun.elapsed().as_secs_f64());
    figures.add("S7/resets", "resets meanwhile, each until the machine was ready", "", resets);
    figures.add("S7/restarts", "restarts meanwhile, each until the machine was ready", "", restarts);
    let (mut errors, mut pauses) = (0, 0);
    for name in &names {
        let stats = host.daemon().json(&["machine", "stats", name])?;
        errors += failures(&stats)?;
        pauses += stats["chunks"]["stalls"].as_u64().context("no count of stalls")?;
        let message = host.machine(name)?["status"]["message"].clone();
        ensure!(message.is_null(), "{name}: {message}");
    }
    pauses += held_events(&host)?;
    bench.site.store.set_model(far())?;
    drop(host);
    figures.add("S7/full/pauses", "times that a guest was stopped, residency full", "", pauses as f64);
    outages(bench, figures, errors)
}

/// A machine whose image is not here meets a store that is away.
fn outages(bench: &Bench, figures: &mut Figures, mut errors: u64) -> Result<()> {
    for _ in 0..OUTAGES {
        let host = Host::new(&bench.site, HostSettings::default())?;
        host.import(IMAGE, "lazy")?;
        host.create_catalog(&bench.site, CATALOG, 1)?;
        let machine = format!("{CATALOG}-001");
        bench.site.store.set_model(gone())?;
        host.daemon().ask(&["machine", "start", &machine])?;
        let missing = wait_closely(SOON, || {
            let stats = host.daemon().json(&["machine", "stats", &machine]).ok()?;
            (stats["chunks"]["missing"].as_u64()? > 0).then(Instant::now)
        });
        let missing = missing.context("the guest has read nothing")?;
        let stopped = host.until(&machine, missing, Duration::from_millis(10), is_held)?;
        std::thread::sleep(Duration::from_secs(5));
        bench.site.store.set_model(far())?;
        let back = Instant::now();
        let resumed = host.until(&machine, back, Duration::from_millis(10), |status| !is_held(status))?;
        host.until(&machine, back, Duration::from_millis(200), |status| status["ready"] == true)?;
        errors += failures(&host.daemon().json(&["machine", "stats", &machine])?)?;
        figures.add("S7/stopped", "from a guest's read that waits until it is stopped", "s", stopped);
        figures.add("S7/resumed", "from the store's return until the guest goes on", "s", resumed);
    }
    figures.add("S7/errors", "requests of guests that failed", "", errors as f64);
    Ok(())
}

fn gone() -> StoreModel {
    StoreModel { away: Some(Away::Silent), ..far() }
}

fn is_held(status: &Value) -> bool {
    status["message"].as_str().is_some_and(|message| message.contains("guest is paused"))
}

/// Requests that ended with an error. Those that are canceled when a guest is stopped are carried out when it goes on.
fn failures(stats: &Value) -> Result<u64> {
    stats["failed"]["requests"].as_u64().context("no count of failures")
}

/// Events about guests that were paused.
fn held_events(host: &Host) -> Result<u64> {
    let events = host.daemon().ask(&["event", "--last", "4096"])?;
    Ok(events.lines().filter(|line| line.contains("guest is paused")).count() as u64)
}

fn wait_all(host: &Host, names: &[String]) -> Result<()> {
    let begun = Instant::now();
    for name in names {
        host.until(name, begun, Duration::from_millis(500), |status| {
            status["ready"] == true && status["settled"] == true
        })?;
    }
    ensure!(begun.elapsed() < BOOT, "the machines took {:?}", begun.elapsed());
    Ok(())
}
