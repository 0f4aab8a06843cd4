//! `spillway reset`: a new generation of a disk. The server decides whether it may be.

use crate::args::Reset;
use crate::error::Failure;
use crate::output;
use spillway_control::{Client, Request};

/// Asks for a reset and says which generation it is now.
pub fn reset(args: &Reset) -> Result<(), Failure> {
    let request = Request::Reset { force: args.force, discard_data: args.discard_data };
    let answer = Client::connect(&args.control)?.ask(&request)?;
    output::print(&format!("generation {}\n", answer["generation"]))?;
    Ok(())
}
