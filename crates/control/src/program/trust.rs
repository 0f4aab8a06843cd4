//! Checks that no other user could replace a program. Owns the rule that a program must fulfil before it is executed.
//!
//! Invariant: a program that has passed can be replaced only by root, by this process's user, or by a user who could have
//! replaced the running program itself. So no other user can put another file in its place between check and execution.

use crate::error::{ErrorKind, SupervisorError};
use std::fs::Metadata;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

const GROUP_WRITES: u32 = 0o020;
const OTHERS_WRITE: u32 = 0o002;
/// In such a folder only the owner of a file can replace it.
const STICKY: u32 = 0o1000;

/// Checks a program and the folders of its path, and returns its path without symbolic links, which is the one to execute.
/// They belong to root, to this process's user, or to the owner of the running program. No other user can write to them;
/// nor can their group, if root executes the program. Folders that the running program lies in, too, are not checked.
pub fn check_program(path: &Path) -> Result<PathBuf, SupervisorError> {
    Rule::of_this_process().check(path)
}

/// Checks the file of a program that is open already, and so cannot be replaced by another file any more.
pub fn check_program_file(path: &Path, file: &Metadata) -> Result<(), SupervisorError> {
    Rule::of_this_process().check_metadata("program", path, file)
}

/// The owners that a process trusts.
struct Rule {
    is_root: bool,
    owners: Vec<u32>,
    /// Where the running program lies.
    own_folder: Option<PathBuf>,
}

impl Rule {
    fn of_this_process() -> Rule {
        let user = rustix::process::geteuid();
        let mut owners = vec![0, user.as_raw()];
        // Also if its file was replaced since it began.
        owners.extend(std::fs::metadata("/proc/self/exe").map(|own| own.uid()));
        let own = std::env::current_exe().ok();
        let own_folder = own.and_then(|own| own.parent()?.canonicalize().ok());
        Rule { is_root: user.is_root(), owners, own_folder }
    }

    fn check(&self, path: &Path) -> Result<PathBuf, SupervisorError> {
        let unusable = |e| {
            let what = format!("{}, the program that serves disks, cannot be used", path.display());
            let advice = "install the whole package, or give the path of another one";
            SupervisorError::caused(ErrorKind::Unavailable, what, e, advice)
        };
        let real = path.canonicalize().map_err(unusable)?;
        let file = real.metadata().map_err(unusable)?;
        if !file.is_file() {
            return Err(unusable(std::io::Error::other("it is no file")));
        }
        self.check_metadata("program", &real, &file)?;
        let is_own = |folder: &Path| self.own_folder.as_deref().is_some_and(|own| own.starts_with(folder));
        for folder in real.ancestors().skip(1).take_while(|folder| !is_own(folder)) {
            self.check_metadata("program's folder", folder, &folder.metadata().map_err(unusable)?)?;
        }
        Ok(real)
    }

    fn check_metadata(&self, what: &str, path: &Path, of: &Metadata) -> Result<(), SupervisorError> {
        let at = path.display();
        let refuse = |why: String, advice: &str| {
            let message =
                format!("the {what} {at} is not trusted: {why}: {advice}, or install the package again");
            Err(SupervisorError::new(ErrorKind::Unavailable, message))
        };
        if !self.owners.contains(&of.uid()) {
            let why = format!("it belongs to user {}, who could change it at any time", of.uid());
            return refuse(why, &format!("give it to root ('chown root {at}')"));
        }
        let is_shared_safely = of.is_dir() && of.mode() & STICKY != 0;
        let (advice, mode) = (format!("take that away ('chmod go-w {at}')"), of.mode());
        match () {
            () if is_shared_safely => Ok(()),
            () if mode & OTHERS_WRITE != 0 => refuse("every user can write to it".into(), &advice),
            () if mode & GROUP_WRITES != 0 && self.is_root => {
                refuse(format!("group {} can write to it", of.gid()), &advice)
            }
            () => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::{Permissions, set_permissions};
    use std::os::unix::fs::{PermissionsExt, chown, symlink};

    fn mode(path: &Path, mode: u32) {
        set_permissions(path, Permissions::from_mode(mode)).unwrap();
    }

    #[test]
    fn what_others_could_change_is_not_executed() {
        let dir = tempfile::tempdir().unwrap();
        let (folder, link) = (dir.path().canonicalize().unwrap(), dir.path().join("link"));
        let program = folder.join("program");
        std::fs::write(&program, "").unwrap();
        symlink(&program, &link).unwrap();
        let user = rustix::process::geteuid().as_raw();
        let rule = |is_root, owners: &[u32], own: Option<&Path>| Rule {
            is_root,
            owners: owners.to_vec(),
            own_folder: own.map(Path::to_owned),
        };
        let (as_root, as_user) = (rule(true, &[user], None), rule(false, &[user], None));
        // Of file and folder: who may write. What root, and what a user, finds wrong.
        for (file, around, root_refuses, user_refuses) in [
            (0o755, 0o755, None, None),
            (0o755, 0o1777, None, None),
            (0o775, 0o755, Some("group"), None),
            (0o755, 0o775, Some("folder"), None),
            (0o757, 0o755, Some("every user"), Some("every user")),
            (0o755, 0o757, Some("folder"), Some("folder")),
        ] {
            mode(&program, file);
            mode(&folder, around);
            for (rule, refuses) in [(&as_root, root_refuses), (&as_user, user_refuses)] {
                match (rule.check(&link), refuses) {
                    (Ok(real), None) => assert_eq!(real, program, "the link may change"),
                    (Err(e), Some(word)) => {
                        let text = e.to_string();
                        assert!(text.contains(word) && text.contains("chmod go-w"), "{text}");
                        assert_eq!(e.kind, ErrorKind::Unavailable);
                    }
                    (found, _) => panic!("{file:o} in {around:o}: {found:?}"),
                }
            }
        }
        // A user who can write to a folder of its parents can replace the folder.
        let below = folder.join("below");
        std::fs::create_dir(&below).unwrap();
        let deep = below.join("program");
        std::fs::write(&deep, "").unwrap();
        let refused = as_user.check(&deep).unwrap_err().to_string();
        assert!(refused.contains(&format!("folder {}", folder.display())), "{refused}");
        // A user who can write to the folder of the running program could have replaced that one.
        assert!(rule(true, &[user], Some(&folder)).check(&deep).is_ok());
        assert!(rule(true, &[user], Some(&folder)).check(&link).is_ok());
        mode(&folder, 0o700);
        let strange = rule(true, &[user + 1], Some(&folder)).check(&program).unwrap_err().to_string();
        assert!(
            strange.contains(&format!("belongs to user {user}")) && strange.contains("chown"),
            "{strange}"
        );
        assert!(as_root.check(&folder).unwrap_err().to_string().contains("no file"));
        assert!(as_root.check(Path::new("/nonexistent")).unwrap_err().to_string().contains("install"));
    }

    #[test]
    fn programs_of_root_and_of_this_user_pass() {
        let dir = tempfile::tempdir().unwrap();
        let program = dir.path().join("program");
        std::fs::write(&program, "").unwrap();
        assert!(check_program(&program).is_ok());
        assert!(check_program(Path::new("/bin/sh")).is_ok());
        assert!(check_program(&std::env::current_exe().unwrap()).is_ok());
        if rustix::process::geteuid().is_root() {
            chown(&program, Some(65534), None).unwrap();
            let error = check_program(&program).unwrap_err().to_string();
            assert!(error.contains("65534"), "{error}");
            let open = program.metadata().unwrap();
            assert!(check_program_file(&program, &open).is_err());
        }
    }
}
