//! `spillway events`: what happens to a disk, as it happens, until the server ends or the reader does.

use crate::args::Events;
use crate::error::Failure;
use crate::output;
use spillway_control::{Client, Request};

/// Prints one line for each event.
pub fn events(args: &Events) -> Result<(), Failure> {
    let mut client = Client::connect(&args.control)?;
    client.ask(&Request::Events)?;
    while let Some(event) = client.next_event()? {
        let line = match args.json {
            true => format!("{event}\n"),
            false => format!(
                "{}: {}\n",
                event["kind"].as_str().unwrap_or_default(),
                event["text"].as_str().unwrap_or_default()
            ),
        };
        if !output::print(&line)? {
            break;
        }
    }
    Ok(())
}
