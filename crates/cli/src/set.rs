//! `spillway set`: other limits for a disk that is being used. The server decides whether they can be.

use crate::args::Set;
use crate::error::{Exit, Failure};
use crate::output;
use spillway_control::{Client, DiskSettings, Request, bytes, rate_is_met};

/// Asks for a change and shows the limits that hold then.
pub fn set(args: &Set) -> Result<(), Failure> {
    let change = args.limits.settings();
    let answer = Client::connect(&args.control)?.ask(&Request::Set(change))?;
    if !rate_is_met(&change, &answer) {
        let why = "an earlier version serves this disk, which limits no rate: 'spillway upgrade' it first";
        return Err(Failure::new(Exit::Refused, format!("{}: {why}", args.control.display())));
    }
    if args.json {
        output::print(&format!("{answer}\n"))?;
        return Ok(());
    }
    let settings: DiskSettings = serde_json::from_value(answer)
        .map_err(|e| Failure::new(Exit::Internal, format!("the server said something else: {e}")))?;
    let limit = |n: u64| if n == 0 { "none".into() } else { bytes(n) };
    output::print(&format!(
        "RAM {}, overflow {}, when full {}, warning at {}%, critical at {}%, {}\n",
        limit(settings.ram_bytes()),
        limit(settings.overflow_bytes()),
        settings.full().name(),
        settings.warn_at(),
        settings.critical_at(),
        settings.rate()
    ))?;
    Ok(())
}
