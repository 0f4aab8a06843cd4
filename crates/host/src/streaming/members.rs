//! The hosts of a fleet, as the process that serves chunks is told of them. Owns the list.
//!
//! Invariant: while nobody has said who the members are, the process keeps the list that an earlier daemon has told it.

use super::client::ControlClient;
use crate::error::HostError;
use rustix::fs::{MemfdFlags, memfd_create};
use spillway_api::ErrorCode;
use spillway_registry::serve::{ControlRequest, MOST_MEMBERS, PeerMember};
use std::fs::File;
use std::io::{Seek, Write};
use std::os::fd::AsFd;
use std::sync::{Mutex, PoisonError};

/// The list. `None`: nobody has said yet who the members are.
#[derive(Default)]
pub struct MemberList(Mutex<Option<Vec<PeerMember>>>);

impl MemberList {
    /// Replaces the list. Returns whether it is another one.
    pub fn replace(&self, mut members: Vec<PeerMember>) -> bool {
        members.sort();
        members.truncate(MOST_MEMBERS);
        let mut list = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let is_other = list.as_ref() != Some(&members);
        *list = Some(members);
        is_other
    }

    /// Tells the process of it.
    ///
    /// # Errors
    /// The process does not answer.
    pub fn tell(&self, client: &ControlClient) -> Result<(), HostError> {
        let Some(members) = self.0.lock().unwrap_or_else(PoisonError::into_inner).clone() else {
            return Ok(());
        };
        let list = in_memory(&members)
            .map_err(|e| HostError::new(ErrorCode::Exhausted, format!("no memory for a list: {e}")))?;
        client.order(&ControlRequest::Members, &[list.as_fd()]).map(drop)
    }
}

fn in_memory(members: &[PeerMember]) -> std::io::Result<File> {
    let mut file = File::from(memfd_create("members", MemfdFlags::CLOEXEC)?);
    file.write_all(&serde_json::to_vec(members)?)?;
    file.rewind()?;
    Ok(file)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_in_another_order_is_the_same() {
        let member = |n: usize| PeerMember { address: format!("https://h{n}:9446"), certificate: "0".into() };
        let list = MemberList::default();
        assert!(list.replace(vec![]), "that nobody is there is news");
        assert!(list.replace(vec![member(1), member(2)]));
        assert!(!list.replace(vec![member(2), member(1)]));
        assert!(list.replace(vec![member(2)]));
        assert!(list.replace((0..2 * MOST_MEMBERS).map(member).collect()));
        assert_eq!(list.0.lock().unwrap().as_ref().unwrap().len(), MOST_MEMBERS);
    }
}
