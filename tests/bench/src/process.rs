//! Child processes and what `/proc` says about them.

use std::collections::BTreeMap;
use std::fs::{self, File, TryLockError};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};

use rustix::process::{Pid, Resource, Rlimit, Signal, getrlimit, kill_process_group, setrlimit};
use tempfile::TempDir;

use crate::Result;

/// Files and connections that one process may need to have open: a gateway has three connections for each of 2,000 streams.
const OPEN_FILES: u64 = 8192;
/// How much of what a process printed is told.
const TOLD_LINES: usize = 15;

/// Raises this process's limit of open files to what the system allows. Whatever is started inherits it.
///
/// # Errors
/// The system allows too few.
pub fn raise_file_limit() -> Result<()> {
    let limit = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, maximum: limit.maximum })?;
    match limit.maximum {
        Some(files) if files < OPEN_FILES => {
            Err(format!("the hard limit of open files (ulimit -Hn) is {files}, and {OPEN_FILES} are needed").into())
        }
        _ => Ok(()),
    }
}

/// Held by the one run that the machine has at a time.
#[derive(Debug)]
#[must_use]
pub struct Lock {
    _file: File,
}

/// Makes sure that no other run goes on: both would look for ports from the same one on, and measure each other.
///
/// # Errors
/// Another run goes on, or the file cannot be opened.
pub fn lock() -> Result<Lock> {
    lock_file(&std::env::temp_dir().join("smg-bench.lock"))
}

fn lock_file(path: &Path) -> Result<Lock> {
    // Another user's file can only be read, which is enough for a lock; the file stays.
    let opened = File::options().create(true).truncate(false).write(true).open(path).or_else(|_| File::open(path));
    let file = opened.map_err(|error| format!("{}: {error}", path.display()))?;
    match file.try_lock() {
        Ok(()) => Ok(Lock { _file: file }),
        Err(TryLockError::WouldBlock) => {
            Err(format!("another smg-bench runs, and each would measure the other ({} is locked)", path.display())
                .into())
        }
        Err(TryLockError::Error(error)) => Err(format!("{}: {error}", path.display()).into()),
    }
}

/// A child that ends with its handle, its own children too, as do its files.
pub struct Process {
    name: String,
    child: Child,
    folder: TempDir,
}

impl Process {
    /// Starts `command` in a process group of its own. It finds a folder of its own in `BENCH_FOLDER`, and neither
    /// proxies nor log levels.
    pub fn start(name: &str, mut command: Command) -> Result<Self> {
        use std::os::unix::process::CommandExt;
        let folder = tempfile::Builder::new().prefix("smg-bench-").tempdir()?;
        let printed = File::create(printed(&folder))?;
        for (variable, _) in std::env::vars_os() {
            let name = variable.to_string_lossy().to_ascii_lowercase();
            if name.ends_with("_proxy") || name == "rust_log" {
                command.env_remove(variable);
            }
        }
        command.env("BENCH_FOLDER", folder.path()).process_group(0);
        command.stdin(Stdio::null()).stdout(printed.try_clone()?).stderr(printed);
        let child = command.spawn().map_err(|error| format!("{name}: {command:?}: {error}"))?;
        Ok(Self { name: name.to_owned(), child, folder })
    }

    /// The process id, which is also that of its group.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// How it ended, if it has.
    pub fn ended(&mut self) -> Result<Option<ExitStatus>> {
        Ok(self.child.try_wait()?)
    }

    /// Its name and the last of what it printed, for an error.
    pub fn told(&self) -> String {
        let text = fs::read(printed(&self.folder)).unwrap_or_default();
        let text = String::from_utf8_lossy(&text);
        let lines: Vec<&str> = text.lines().collect();
        let last = lines.get(lines.len().saturating_sub(TOLD_LINES)..).unwrap_or_default();
        let name = &self.name;
        if last.is_empty() {
            format!("{name} printed nothing")
        } else {
            format!("{name} printed:\n{}", last.join("\n"))
        }
    }

    /// CPU seconds (user and system) of the process and all its descendants.
    pub fn cpu_seconds(&self) -> Result<f64> {
        let mut total = 0.0;
        for process in tree(self.id())? {
            if let Some(stat) = stat(process) {
                total += stat.cpu_ticks as f64 / ticks_per_second();
            }
        }
        Ok(total)
    }

    /// Resident memory of the process and all its descendants, in KiB.
    pub fn resident_kib(&self) -> Result<u64> {
        Ok(tree(self.id())?.into_iter().filter_map(|process| memory_kib(process, "VmRSS:")).sum())
    }

    /// The most that was resident since [`Self::forget_peak`], in KiB: each process at its own peak.
    pub fn peak_kib(&self) -> Result<u64> {
        Ok(tree(self.id())?.into_iter().filter_map(|process| memory_kib(process, "VmHWM:")).sum())
    }

    /// Begins a new peak.
    ///
    /// # Errors
    /// The system does not let this user do that.
    pub fn forget_peak(&self) -> Result<()> {
        for process in tree(self.id())? {
            let path = format!("/proc/{process}/clear_refs");
            if let Err(error) = fs::write(&path, "5")
                && error.kind() != ErrorKind::NotFound
            {
                return Err(format!("{path}: {error}").into());
            }
        }
        Ok(())
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // The whole group: a peer may be a shell with children.
        if let Some(group) = i32::try_from(self.id()).ok().and_then(Pid::from_raw) {
            let _ = kill_process_group(group, Signal::KILL);
        }
        let _ = self.child.wait();
    }
}

fn printed(folder: &TempDir) -> PathBuf {
    folder.path().join("printed")
}

struct Stat {
    parent: u32,
    cpu_ticks: u64,
}

fn stat(process: u32) -> Option<Stat> {
    let text = fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
    // The command name is in parentheses and may hold anything.
    let fields: Vec<&str> = text.rsplit_once(") ")?.1.split(' ').collect();
    let number = |index: usize| fields.get(index).and_then(|field| field.parse::<u64>().ok());
    Some(Stat { parent: u32::try_from(number(1)?).ok()?, cpu_ticks: number(11)? + number(12)? })
}

fn tree(root: u32) -> Result<Vec<u32>> {
    let mut children: BTreeMap<u32, Vec<u32>> = BTreeMap::new();
    for entry in fs::read_dir("/proc")? {
        if let Some(process) = entry?.file_name().to_str().and_then(|name| name.parse::<u32>().ok())
            && let Some(stat) = stat(process)
        {
            children.entry(stat.parent).or_default().push(process);
        }
    }
    let mut found = vec![root];
    let mut next = 0;
    while let Some(process) = found.get(next) {
        found.extend(children.remove(process).unwrap_or_default());
        next += 1;
    }
    Ok(found)
}

fn memory_kib(process: u32, field: &str) -> Option<u64> {
    let status = fs::read_to_string(format!("/proc/{process}/status")).ok()?;
    status.lines().find_map(|line| line.strip_prefix(field)?.split_whitespace().next()?.parse().ok())
}

/// Linux counts CPU time in hundredths of a second for user space, whatever the kernel's own tick is.
fn ticks_per_second() -> f64 {
    100.0
}

/// What else the machine does.
pub fn load() -> String {
    format!("load average {}", fs::read_to_string("/proc/loadavg").unwrap_or_default().trim())
}

/// One line about the machine.
pub fn machine() -> String {
    let model = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = model.lines().find_map(|line| line.strip_prefix("model name")).unwrap_or("");
    let cores = std::thread::available_parallelism().map_or(0, usize::from);
    format!("machine: {cores} cores, {}; {}", model.trim_start_matches(['\t', ' ', ':']), load())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn two_runs_at_once_refuse_and_one_after_the_other_do_not() {
        let folder = TempDir::new().unwrap();
        let path = folder.path().join("lock");
        let first = lock_file(&path).unwrap();
        assert!(lock_file(&path).unwrap_err().to_string().contains("another smg-bench"));
        drop(first);
        drop(lock_file(&path).unwrap());
    }
}
