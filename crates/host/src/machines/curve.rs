//! What every size of a machine's RAM tier would have done: asked of its disk.

use super::run::Folder;
use super::{Machines, disk};
use crate::error::HostError;
use spillway_api::{DiskCurve, ErrorCode, Name};
use spillway_control::Request;

impl Machines {
    /// The curve of a machine whose disk is served.
    pub fn curve(&self, name: &Name, goal: Option<f64>) -> Result<DiskCurve, HostError> {
        if goal.is_some_and(|goal| !(0.0..=1.0).contains(&goal)) {
            return Err(HostError::new(ErrorCode::Invalid, "a goal is a share: 0 to 1"));
        }
        let view = self.view(name)?;
        if view.status.run.as_ref().is_none_or(|run| run.disk_pid.is_none()) {
            let message = format!("{name} has no disk that is served: start it first");
            return Err(HostError::new(ErrorCode::Conflict, message));
        }
        let folder = Folder::of(&self.shared.parts.folder, name);
        let answer = disk::ask(folder.path(), &Request::Curve { goal })?;
        serde_json::from_value(answer).map_err(|e| {
            let message = format!("{name}: its disk is of another version, whose curve cannot be read: {e}");
            HostError::new(ErrorCode::Unavailable, message)
        })
    }
}
