//! Requests to guests: programs, and files. They take as long as their guests do.
//!
//! Invariant: the content of a file is passed on as it is.

use super::{ApiRequest, Client, ClientError, PATIENCE, query};
use crate::{GuestFile, GuestProgram, GuestProgramResult, Name};
use hyper::Method;
use hyper::body::Bytes;
use std::time::Duration;

/// Longest time for a file, in addition to that for a response: a guest may be slow, and other files of it may come first.
const FILE: Duration = Duration::from_secs(480);

impl Client {
    /// Runs a program in a machine's guest, and waits for its end as long as its time limit says.
    pub fn run_in_guest(
        &self,
        name: &Name,
        program: &GuestProgram,
    ) -> Result<GuestProgramResult, ClientError> {
        let path = format!("/v1/machines/{name}/exec");
        let body = serde_json::to_vec(program).expect("a program is plain data");
        let asked = self.answer_to(ApiRequest::new(Method::POST, &path, body));
        let answer = self.within(program.time_limit() + PATIENCE * 2, asked)?;
        self.understood(&answer)
    }

    /// Writes a file in a machine's guest.
    pub fn write_in_guest(
        &self,
        name: &Name,
        path: &str,
        content: Vec<u8>,
    ) -> Result<GuestFile, ClientError> {
        let path = file(name, path);
        let question = ApiRequest {
            content_type: "application/octet-stream",
            ..ApiRequest::new(Method::PUT, &path, content)
        };
        let answer = self.within(PATIENCE + FILE, self.answer_to(question))?;
        self.understood(&answer)
    }

    /// Reads a file in a machine's guest.
    pub fn read_in_guest(&self, name: &Name, path: &str) -> Result<Bytes, ClientError> {
        let path = file(name, path);
        self.within(PATIENCE + FILE, self.answer_to(ApiRequest::new(Method::GET, &path, Vec::new())))
    }
}

fn file(name: &Name, path: &str) -> String {
    format!("/v1/machines/{name}/files{}", query([("path", path.to_owned())]))
}
