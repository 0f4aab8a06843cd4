//! Waits for operations and shows their progress. Ctrl-C stops the waiting, not the operation.

use crate::error::Failure;
use indicatif::{ProgressBar, ProgressStyle};
use spillway_api::client::Client;
use spillway_api::{Operation, OperationState};

/// Waits for the end of an operation. Shows a bar if standard error is a terminal. It shows no bytes: those of the work are
/// not those of the image, which is written and read back. Returns the operation as it has ended.
pub fn wait(client: &Client, begun: &Operation) -> Result<Operation, Failure> {
    let bar = ProgressBar::new(0);
    let style = ProgressStyle::with_template("{msg} {bar:30} {percent}%, {eta} left");
    bar.set_style(style.expect("the template is right"));
    bar.set_message(begun.what.clone());
    loop {
        let path = format!("/v1/operations/{}?wait=1", begun.id);
        let now: Operation = client.get(&path)?;
        // A bar without a length would be full.
        bar.set_length(now.total_bytes.max(1));
        bar.set_position(now.done_bytes);
        match now.state {
            OperationState::Running => {}
            OperationState::Done => {
                bar.finish_and_clear();
                return Ok(Operation { state: OperationState::Done, ..now });
            }
            OperationState::Failed { error } => {
                bar.finish_and_clear();
                return Err(Failure::new(error.code.exit(), error.detail));
            }
        }
    }
}
