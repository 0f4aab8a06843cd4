//! `spillway event`: past and new events. Owns the format of an event, and reconnects when the daemon restarts.
//!
//! Invariant: an event is shown once, and none is left out silently, whichever daemon raised it.

use super::{Daemon, table, word};
use crate::error::{Exit, Failure};
use crate::output;
use clap::Args;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use spillway_api::client::Client;
use spillway_api::{Event, EventId, EventKind, List};
use std::thread::sleep;
use std::time::Duration;

/// Pause between two attempts to reconnect.
const RETRY: Duration = Duration::from_secs(1);

/// Options of `event`.
#[derive(Debug, Args)]
#[group(skip)]
pub struct Events {
    /// Follow new events until Ctrl-C, also over restarts of spillwayd
    #[arg(short, long)]
    follow: bool,
    /// Number of past events to show
    #[arg(short = 'n', long, value_name = "N", default_value_t = 50)]
    last: u32,
    /// Only events of this kind; may be given more than once
    #[arg(long, value_name = "KIND", value_parser = kind())]
    kind: Vec<EventKind>,
    /// Only events about this object, such as machine/desk-001, catalog/desk, store/local or host; may be given more
    /// than once
    #[arg(long, value_name = "OBJECT")]
    object: Vec<String>,
}

fn kind() -> impl TypedValueParser<Value = EventKind> {
    let words = EventKind::ALL.map(|kind| word(&kind));
    PossibleValuesParser::new(words).map(|chosen| {
        let known = EventKind::ALL.into_iter().find(|kind| word(kind) == chosen);
        known.expect("no other word is possible")
    })
}

/// Shows the events.
pub fn event(daemon: &Daemon, args: &Events) -> Result<(), Failure> {
    let client = daemon.client()?;
    let known: List<Event> = client.get("/v1/events")?;
    let mut chosen: Vec<&Event> = known.items.iter().filter(|event| args.choose(event)).collect();
    chosen.drain(..chosen.len().saturating_sub(args.last as usize));
    let text: String = match daemon.json || args.follow {
        true => chosen.into_iter().map(|event| line(event, daemon.json)).collect(),
        false => table(["TIME", "KIND", "OBJECT", "WHAT"], chosen.into_iter().map(cells)),
    };
    if !output::print(&text)? || !args.follow {
        return Ok(());
    }
    let last = known.items.last().map(|event| event.id);
    let mut listener = EventFollower { args, json: daemon.json, last, is_waiting: false };
    while listener.listens(&client)? {
        sleep(RETRY);
    }
    Ok(())
}

impl Events {
    fn choose(&self, event: &Event) -> bool {
        (self.kind.is_empty() || self.kind.contains(&event.kind))
            && (self.object.is_empty() || self.object.contains(&event.object))
    }

    /// Selects events. A loss of events concerns every reader.
    fn hear(&self, event: &Event) -> bool {
        self.choose(event) || event.kind == EventKind::Lost
    }
}

/// Follows the events of a daemon.
struct EventFollower<'a> {
    args: &'a Events,
    json: bool,
    /// Id of the last event that was received, shown or not.
    last: Option<EventId>,
    /// Whether the notice about a missing daemon was printed.
    is_waiting: bool,
}

impl EventFollower<'_> {
    /// Runs until the connection ends. Returns `false` if nobody reads the output.
    fn listens(&mut self, client: &Client) -> Result<bool, Failure> {
        match self.hear(client) {
            Err(gone) if gone.exit == Exit::Unavailable => {
                if !self.is_waiting {
                    output::complain("notice", "spillwayd does not answer any more: waiting for it");
                }
                self.is_waiting = true;
                Ok(true)
            }
            heard => heard.map(|()| false),
        }
    }

    fn hear(&mut self, client: &Client) -> Result<(), Failure> {
        let mut following = client.follow(self.last)?;
        if self.is_waiting {
            output::complain("notice", "spillwayd answers again");
            self.is_waiting = false;
        }
        while let Some(event) = following.next_event()? {
            if self.args.hear(&event) && !output::print(&line(&event, self.json))? {
                return Ok(());
            }
            self.last = Some(event.id);
        }
        Err(Failure::new(Exit::Unavailable, "spillwayd has ended"))
    }
}

fn cells(event: &Event) -> [String; 4] {
    let time = event.time.strftime("%Y-%m-%d %H:%M:%S").to_string();
    [time, word(&event.kind), one_line(&event.object), one_line(&event.text)]
}

/// Formats an event for a continuous list: the columns are as wide as most values.
fn line(event: &Event, json: bool) -> String {
    if json {
        return format!("{}\n", serde_json::to_string(event).expect("an event is plain data"));
    }
    let [time, kind, object, text] = cells(event);
    format!("{time}  {kind:<10}  {object:<20}  {text}\n")
}

/// Parts of the text may come from a guest and must not control the terminal.
fn one_line(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(text: &str) -> Event {
        let value = serde_json::json!({
            "id": "9f3c00a1-7", "time": "2026-01-02T03:04:05.6Z", "kind": "rolled-out", "object": "catalog/desk", "text": text,
        });
        serde_json::from_value(value).unwrap()
    }

    #[test]
    fn an_event_is_one_line() {
        let told = line(&event("a\nb\x1b[2J"), false);
        assert_eq!(told, "2026-01-02 03:04:05  rolled-out  catalog/desk          a b [2J\n");
        let told = line(&event("a\nb"), true);
        assert_eq!((told.lines().count(), serde_json::from_str::<Event>(&told).unwrap()), (1, event("a\nb")));
    }

    #[test]
    fn all_that_is_named_must_fit() {
        let choose = |kind: &[EventKind], object: &[&str]| {
            let object = object.iter().map(|object| object.to_string()).collect();
            Events { follow: false, last: 1, kind: kind.to_vec(), object }.choose(&event(""))
        };
        assert!(
            choose(&[], &[]) && choose(&[EventKind::Disk, EventKind::RolledOut], &["host", "catalog/desk"])
        );
        assert!(
            !choose(&[EventKind::Disk], &["catalog/desk"]) && !choose(&[EventKind::RolledOut], &["desk"])
        );
    }
}
