//! What every size of the RAM tier would have done, of all machines: asked of their disks, all at once and seldom. Owns
//! what they said last.
//!
//! Invariant: a disk that does not answer is told of as it was; one that is served no more is not.

use super::{PATIENCE, answer, ask_all, connect};
use crate::error::HostError;
use crate::machines::run::MachineFolders;
use crate::machines::views::MachineReader;
use crate::machines::{View, blocking, disk};
use spillway_api::{CurveFigures, DiskCurve, ErrorCode, Name, Selector};
use spillway_control::Request;
use std::collections::BTreeMap;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::Instant;

/// Asked again sooner, the answer is the same: a curve changes with hours, and its disk's worker stops to draw it.
const FRESH: Duration = Duration::from_secs(30);

/// What disks have said, by machine: each with its catalog.
pub type CurvesByMachine = BTreeMap<Name, (Name, CurveFigures)>;

/// Collects the curves of machines' disks.
pub struct CurveCollector {
    reader: MachineReader,
    folders: MachineFolders,
    /// What was asked last, and when.
    last: tokio::sync::Mutex<Option<(Instant, Arc<CurvesByMachine>)>>,
}

impl CurveCollector {
    /// Of these machines, none of which was asked yet.
    pub fn new(reader: MachineReader, folders: MachineFolders) -> CurveCollector {
        CurveCollector { reader, folders, last: tokio::sync::Mutex::default() }
    }

    /// The curve of a machine whose disk is served, asked of that now.
    pub fn of(&self, name: &Name, goal: Option<f64>) -> Result<DiskCurve, HostError> {
        if goal.is_some_and(|goal| !(0.0..=1.0).contains(&goal)) {
            return Err(HostError::new(ErrorCode::Invalid, "a goal is a share: 0 to 1"));
        }
        let view = self.reader.view(name)?;
        if view.status.run.as_ref().is_none_or(|run| run.disk_pid.is_none()) {
            let message = format!("{name} has no disk that is served: start it first");
            return Err(HostError::new(ErrorCode::Conflict, message));
        }
        let answer = disk::ask(self.folders.of(name).path(), &Request::Curve { goal })?;
        serde_json::from_value(answer).map_err(|e| {
            let message = format!("{name}: its disk is of another version, whose curve cannot be read: {e}");
            HostError::new(ErrorCode::Unavailable, message)
        })
    }

    /// The curves of all machines that have a RAM tier, not much older than half a minute.
    pub async fn all(&self) -> Result<Arc<CurvesByMachine>, HostError> {
        let mut last = self.last.lock().await;
        if let Some((at, curves)) = &*last
            && at.elapsed() < FRESH
        {
            return Ok(Arc::clone(curves));
        }
        let reader = self.reader.clone();
        let views = blocking(move || reader.views(&Selector::default())).await?;
        let served: Vec<&View> = views.iter().filter(|view| has_curve(view)).collect();
        let until = Instant::now() + PATIENCE;
        let mut curves = CurvesByMachine::new();
        let known = last.as_ref().map(|(_, known)| known);
        for view in &served {
            if let Some(of) = known.and_then(|known| known.get(&view.machine.name)) {
                curves.insert(view.machine.name.clone(), of.clone());
            }
        }
        for (view, figures) in ask_all(&self.folders, served.into_iter(), until, ask).await {
            curves.insert(view.machine.name.clone(), (view.machine.catalog.clone(), figures));
        }
        let curves = Arc::new(curves);
        *last = Some((Instant::now(), Arc::clone(&curves)));
        Ok(curves)
    }
}

fn has_curve(view: &View) -> bool {
    view.status.run.as_ref().is_some_and(|run| run.disk_pid.is_some() && run.ram_bytes.is_some())
}

async fn ask(folder: PathBuf) -> io::Result<CurveFigures> {
    let curve = answer(&mut connect(&folder).await?, &Request::Curve { goal: None }).await?;
    let curve: DiskCurve = serde_json::from_value(curve)?;
    Ok(CurveFigures::from(&curve))
}
