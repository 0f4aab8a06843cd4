//! `spillway stats`: asks a disk for its figures and shows them in one of many ways.
//!
//! Invariant: JSON is passed on as the server sent it, so that a newer server's keys are not lost.

use crate::args::{Names, Stats as Args};
use crate::error::{Exit, Failure};
use crate::{advise, dirty, mcsio, output, prometheus, table};
use serde_json::Value;
use spillway_control::{Client, Request, Stats};
use std::io::IsTerminal;
use std::time::{Duration, Instant};

const INTERVAL: Duration = Duration::from_secs(1);

/// Shows the figures once, or every second until nobody reads or nobody serves.
pub fn stats(args: &Args) -> Result<(), Failure> {
    args.check()?;
    let mut client = Client::connect(&args.control)?;
    if args.dirty {
        return dirty::dirty(args, &mut client);
    }
    if args.curve {
        return curve(args, &mut client);
    }
    let mut last: Option<(Instant, Stats)> = None;
    let mut due = Instant::now();
    loop {
        let value = client.ask(&Request::Stats)?;
        let now = Instant::now();
        let stats = read(&value)?;
        let text = match () {
            () if args.json => {
                let value = match args.names {
                    Some(Names::Mcsio) => mcsio::json(&stats),
                    None => value,
                };
                // Watched, each object is one line.
                if args.watch { format!("{value}\n") } else { format!("{value:#}\n") }
            }
            () if args.prometheus => {
                let curve = client.ask(&Request::Curve { goal: None })?;
                let curve = serde_json::from_value(curve).map_err(|e| unreadable(&e))?;
                prometheus::text(&stats) + &prometheus::curve(&stats.serial, &curve)
            }
            () => {
                let mut text = match args.names {
                    Some(Names::Mcsio) => mcsio::table(&stats),
                    None => table::summary(&stats),
                };
                if let Some((then, before)) = &last {
                    text.push('\n');
                    text.push_str(&table::rates(before, &stats, now - *then));
                }
                if args.watch && std::io::stdout().is_terminal() {
                    // Home, then clear below: no flicker.
                    text.insert_str(0, "\x1b[H\x1b[J");
                }
                text
            }
        };
        if !output::print(&text)? || !args.watch {
            return Ok(());
        }
        last = Some((now, stats));
        due = (due + INTERVAL).max(now);
        std::thread::sleep(due - now);
    }
}

/// What every size of the RAM tier would have done.
fn curve(args: &Args, client: &mut Client) -> Result<(), Failure> {
    let value = client.ask(&Request::Curve { goal: None })?;
    let text = match args.json {
        true => format!("{value:#}\n"),
        false => {
            let seconds = value["seconds"].as_f64().unwrap_or(0.0);
            advise::of_disk(&serde_json::from_value(value).map_err(|e| unreadable(&e))?, seconds)
        }
    };
    output::print(&text).map(drop)
}

fn read(value: &Value) -> Result<Stats, Failure> {
    serde_json::from_value(value.clone()).map_err(|e| unreadable(&e))
}

fn unreadable(error: &serde_json::Error) -> Failure {
    Failure::new(
        Exit::Unavailable,
        format!("the server's figures cannot be read ({error}): use the same version of spillway for both"),
    )
}
