//! `spillway fleet event`: events of all hosts. Owns where the events of each host were read to.
//!
//! Invariant: an event is shown once, and none is left out silently, whichever host is asked.

use super::super::event::{cells, one_line};
use super::super::{Daemon, table};
use crate::error::{Exit, Failure};
use crate::output;
use clap::Args;
use spillway_api::client::Client;
use spillway_api::{EventId, FleetEvent, FleetEventRequest, List, Name};
use std::collections::BTreeMap;
use std::thread::sleep;
use std::time::Duration;

/// Pause between two attempts to reconnect.
const RETRY: Duration = Duration::from_secs(1);

/// Options of `fleet event`.
#[derive(Debug, Args)]
#[group(skip)]
pub struct FleetEvents {
    /// Follow new events until Ctrl-C, also over restarts of daemons
    #[arg(short, long)]
    follow: bool,
    /// Number of past events to show; with --follow, of each host
    #[arg(short = 'n', long, value_name = "N", default_value_t = 50, value_parser = clap::value_parser!(u32).range(0..=1000))]
    last: u32,
}

/// Shows the events.
pub fn event(daemon: &Daemon, client: &Client, args: &FleetEvents) -> Result<(), Failure> {
    if !args.follow {
        let limit = args.last.max(1);
        let list: List<FleetEvent> = client.get(&format!("/v1/fleet/events?limit={limit}"))?;
        return daemon.show(&list, |list| {
            let rows = list.items.iter().map(row);
            table(["HOST", "TIME", "KIND", "OBJECT", "WHAT"], rows)
        });
    }
    let mut request = FleetEventRequest { after: BTreeMap::new(), limit: args.last };
    let mut is_waiting = false;
    loop {
        match follow(daemon, client, &mut request, &mut is_waiting) {
            Err(gone) if gone.exit == Exit::Unavailable => {
                if !std::mem::replace(&mut is_waiting, true) {
                    output::complain("notice", "spillwayd does not answer any more: waiting for it");
                }
            }
            done => return done,
        }
        sleep(RETRY);
    }
}

/// Follows until the connection ends, or nobody reads the output.
fn follow(
    daemon: &Daemon,
    client: &Client,
    request: &mut FleetEventRequest,
    is_waiting: &mut bool,
) -> Result<(), Failure> {
    let mut following = client.follow_by("/v1/fleet/event-stream", request)?;
    if std::mem::take(is_waiting) {
        output::complain("notice", "spillwayd answers again");
    }
    while let Some(item) = following.next_item::<FleetEvent>()? {
        note(&mut request.after, &item);
        let text = match daemon.json {
            true => format!("{}\n", serde_json::to_string(&item).expect("an event is plain data")),
            false => {
                let [host, time, kind, object, text] = row(&item);
                format!("{host:<12}  {time:<19}  {kind:<10}  {object:<20}  {text}\n")
            }
        };
        if !output::print(&text)? {
            return Ok(());
        }
    }
    Err(Failure::new(Exit::Unavailable, "spillwayd has ended"))
}

/// Notes what was read of a host.
fn note(after: &mut BTreeMap<Name, EventId>, item: &FleetEvent) {
    if let Some(event) = &item.event {
        after.insert(item.host.clone(), event.id);
    }
}

fn row(item: &FleetEvent) -> [String; 5] {
    let host = item.host.to_string();
    match (&item.event, &item.unreachable) {
        (Some(event), _) => {
            let [time, kind, object, text] = cells(event);
            [host, time, kind, object, text]
        }
        (None, why) => {
            let why = why.as_deref().unwrap_or("no reason is known");
            [
                host,
                "-".into(),
                "-".into(),
                "-".into(),
                format!("its events are not known now: {}", one_line(why)),
            ]
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_that_cannot_be_asked_changes_nothing_of_what_was_read() {
        let host: Name = "a".parse().unwrap();
        let event = serde_json::json!({
            "host": "a", "event": {
                "id": "9f3c00a1-7", "time": "2026-01-02T03:04:05.6Z", "kind": "ready", "object": "machine/x", "text": "t",
            },
        });
        let event: FleetEvent = serde_json::from_value(event).unwrap();
        let gone = FleetEvent { host: host.clone(), event: None, unreachable: Some("a\nb".into()) };
        let mut after = BTreeMap::new();
        note(&mut after, &event);
        note(&mut after, &gone);
        assert_eq!(after[&host].number, 7);
        assert_eq!(row(&event), ["a", "2026-01-02 03:04:05", "ready", "machine/x", "t"]);
        assert_eq!(row(&gone)[4], "its events are not known now: a b");
    }
}
