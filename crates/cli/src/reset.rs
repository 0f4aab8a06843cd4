//! `spillway reset`: a new generation of a disk. The server decides whether it may be.

use crate::args::Reset;
use crate::client::Client;
use crate::error::Failure;
use crate::output;
use spillway_worker::supervisor::Request;

/// Asks for a reset and says which generation it is now.
pub fn reset(args: &Reset) -> Result<(), Failure> {
    let answer = Client::connect(&args.control)?.ask(&Request::Reset { force: args.force })?;
    output::print(&format!("generation {}\n", answer["generation"]))?;
    Ok(())
}
