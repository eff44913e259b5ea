//! Files of a directory, one a day (UTC): `smg.YYYY-MM-DD.log`.
//!
//! Invariants
//! * lines go where their reader looks for them: a file that was removed or moved away, or its whole directory, is made anew within
//!   [`LOOK_EVERY`];
//! * where a file of today cannot be opened, the one before goes on as long as it has a name, and after that lines fail;
//! * nothing is ever removed but files of that name, the oldest beyond [`KEPT_FILES`].
//!
//! Processes may share a directory: each line is appended whole.

use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind, Read, Seek, SeekFrom};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use time::{Date, OffsetDateTime};

use super::sink::{Lines, Target};
use crate::SMG;

/// Most files that are kept.
const KEPT_FILES: usize = 14;
/// How often it is looked whether the file is still where it should be.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// The files of a directory.
pub struct Files<Today = fn() -> Date> {
    directory: PathBuf,
    today: Today,
    open: Option<Lines<File>>,
    /// The day for which it was last looked for the file, and when.
    looked: Option<(Date, Instant)>,
}

/// The day it is, in UTC.
pub fn today() -> Date {
    OffsetDateTime::now_utc().date()
}

impl<Today: FnMut() -> Date> Files<Today> {
    /// Files in `directory`, which is made when it is missing.
    ///
    /// # Errors
    /// When the file of the day cannot be opened.
    pub fn open(directory: &Path, today: Today) -> io::Result<Self> {
        let mut files = Self { directory: directory.to_owned(), today, open: None, looked: None };
        files.look()?;
        Ok(files)
    }

    /// Sees to it that the file of the day is open.
    fn look(&mut self) -> io::Result<()> {
        let (day, now) = ((self.today)(), Instant::now());
        let last = self.looked;
        if last.is_some_and(|(looked_for, at)| looked_for == day && now.duration_since(at) < LOOK_EVERY) {
            return Ok(());
        }
        self.looked = Some((day, now));
        let path = self.directory.join(name_of(day));
        if self.open.as_ref().is_some_and(|lines| is_at(&lines.out, &path)) {
            return Ok(());
        }
        match append_to(&path) {
            Ok(lines) => {
                self.open = Some(lines);
                self.remove_old(day);
                Ok(())
            }
            Err(error) if self.open.as_ref().is_some_and(|lines| has_name(&lines.out)) => {
                if last.is_some_and(|(looked_for, _)| looked_for != day) {
                    tracing::warn!(target: SMG, %error, "the log file of today cannot be opened: the one before goes on");
                }
                Ok(())
            }
            Err(error) => {
                self.open = None;
                Err(error)
            }
        }
    }

    /// Removes the files of the oldest days beyond those that are kept. What cannot be removed stays.
    fn remove_old(&self, day: Date) {
        let Ok(entries) = fs::read_dir(&self.directory) else { return };
        let files = entries.flatten().filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_file()));
        let names = files.filter_map(|entry| entry.file_name().into_string().ok());
        let mut ours: Vec<String> = names.filter(|name| is_ours(name)).collect();
        // Days sort as their names do.
        ours.sort_unstable();
        for name in ours.iter().take(ours.len().saturating_sub(KEPT_FILES)).filter(|name| **name != name_of(day)) {
            let _ = fs::remove_file(self.directory.join(name));
        }
    }
}

impl<Today: FnMut() -> Date + Send + 'static> Target for Files<Today> {
    fn write_line(&mut self, line: &[u8]) -> io::Result<()> {
        self.look()?;
        match &mut self.open {
            Some(lines) => lines.write_line(line),
            None => Err(ErrorKind::NotFound.into()),
        }
    }
}

fn name_of(day: Date) -> String {
    format!("smg.{day}.log")
}

fn is_ours(name: &str) -> bool {
    let day = name.strip_prefix("smg.").and_then(|rest| rest.strip_suffix(".log"));
    let shape = |(at, byte): (usize, u8)| if at == 4 || at == 7 { byte == b'-' } else { byte.is_ascii_digit() };
    day.is_some_and(|day| day.len() == 10 && day.bytes().enumerate().all(shape))
}

/// Opens a file to append to, and makes it and its directory where they are missing.
fn append_to(path: &Path) -> io::Result<Lines<File>> {
    if let Some(directory) = path.parent() {
        fs::create_dir_all(directory)?;
    }
    let out = OpenOptions::new().append(true).create(true).open(path)?;
    Ok(Lines { out, torn: ends_within_a_line(path) })
}

/// Whether whoever wrote the file before could not end its last line.
fn ends_within_a_line(path: &Path) -> bool {
    let last_byte = || {
        let mut file = File::open(path)?;
        file.seek(SeekFrom::End(-1))?;
        let mut last = [0];
        file.read_exact(&mut last)?;
        io::Result::Ok(last)
    };
    last_byte().is_ok_and(|last| last != *b"\n")
}

/// Whether `path` leads to this file.
fn is_at(file: &File, path: &Path) -> bool {
    let (Ok(open), Ok(there)) = (file.metadata(), fs::metadata(path)) else { return false };
    (open.dev(), open.ino()) == (there.dev(), there.ino())
}

/// Whether any path leads to this file.
fn has_name(file: &File) -> bool {
    file.metadata().is_ok_and(|open| open.nlink() > 0)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::cell::Cell;
    use std::rc::Rc;

    use tempfile::TempDir;

    use super::*;

    /// Files of a day that a test chooses.
    struct Scene {
        directory: TempDir,
        day: Rc<Cell<i64>>,
    }

    impl Scene {
        fn new() -> Self {
            Self { directory: tempfile::tempdir().unwrap(), day: Rc::default() }
        }

        fn path(&self) -> PathBuf {
            self.directory.path().join("logs")
        }

        fn open(&self) -> io::Result<Files<impl FnMut() -> Date + use<>>> {
            let day = Rc::clone(&self.day);
            Files::open(&self.path(), move || date(day.get()))
        }

        fn read(&self, day: i64) -> String {
            fs::read_to_string(self.path().join(name_of(date(day)))).unwrap()
        }

        fn names(&self) -> Vec<String> {
            let entries = fs::read_dir(self.path()).unwrap();
            let mut names: Vec<_> = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
            names.sort_unstable();
            names
        }
    }

    /// The eve of 2027, and days after it.
    fn date(day: i64) -> Date {
        OffsetDateTime::from_unix_timestamp(1_798_675_200 + day * 86_400).unwrap().date()
    }

    impl<Today: FnMut() -> Date> Files<Today> {
        /// Writes a line as if the last look were long ago.
        fn put(&mut self, line: &str) -> io::Result<()> {
            self.looked = self.looked.map(|(day, at)| (day, at.checked_sub(LOOK_EVERY).unwrap()));
            self.put_at_once(line)
        }

        fn put_at_once(&mut self, line: &str) -> io::Result<()> {
            self.look()?;
            self.open.as_mut().ok_or(ErrorKind::NotFound)?.write_line(line.as_bytes())
        }
    }

    #[test]
    fn each_day_has_a_file_and_the_last_fourteen_are_kept() {
        let scene = Scene::new();
        let mut files = scene.open().unwrap();
        let others =
            ["smg.2020-01-01.log.gz", "smg.2020-1-01.log", "smg-2020-01-01.log", "smg.log", "smg.important!.log"];
        others.iter().for_each(|name| fs::write(scene.path().join(name), "").unwrap());
        fs::create_dir(scene.path().join("smg.2020-01-01.log")).unwrap();
        std::os::unix::fs::symlink("smg.log", scene.path().join("smg.2020-01-02.log")).unwrap();
        for day in 0..20 {
            scene.day.set(day);
            files.put_at_once(&format!("of day {day}\n")).unwrap();
        }
        assert_eq!(name_of(date(0)), "smg.2026-12-31.log");
        let ours: Vec<_> = (6..20).map(|day| name_of(date(day))).collect();
        let names = scene.names();
        let kept: Vec<_> = names.iter().filter(|name| name.starts_with("smg.2027")).collect();
        assert_eq!(kept, ours.iter().collect::<Vec<_>>());
        assert_eq!(names.len(), 14 + others.len() + 2, "nothing else is removed: {names:?}");
        assert_eq!((scene.read(6), scene.read(19)), ("of day 6\n".to_owned(), "of day 19\n".to_owned()));
    }

    #[test]
    fn a_file_that_is_moved_away_or_removed_with_its_directory_is_made_anew() {
        let scene = Scene::new();
        let mut files = scene.open().unwrap();
        files.put("one\n").unwrap();
        let file = scene.path().join(name_of(date(0)));
        fs::rename(&file, scene.path().join("moved")).unwrap();
        files.put("two\n").unwrap();
        assert_eq!(fs::read_to_string(scene.path().join("moved")).unwrap(), "one\n");
        fs::remove_file(&file).unwrap();
        files.put("three\n").unwrap();
        assert_eq!(scene.read(0), "three\n");
        fs::remove_dir_all(scene.path()).unwrap();
        files.put("four\n").unwrap();
        assert_eq!(scene.read(0), "four\n");
    }

    #[test]
    fn while_there_is_no_place_for_a_file_lines_fail_and_then_go_on() {
        let scene = Scene::new();
        let mut files = scene.open().unwrap();
        fs::remove_dir_all(scene.path()).unwrap();
        fs::write(scene.path(), "in the way").unwrap();
        assert!(files.put("lost\n").is_err());
        assert!(files.put_at_once("lost at once\n").is_err());
        fs::remove_file(scene.path()).unwrap();
        files.put("kept\n").unwrap();
        assert_eq!(scene.read(0), "kept\n");
    }

    #[test]
    fn a_day_whose_file_cannot_be_opened_goes_on_in_the_one_before() {
        let scene = Scene::new();
        let mut files = scene.open().unwrap();
        let in_the_way = scene.path().join(name_of(date(1)));
        fs::create_dir(&in_the_way).unwrap();
        scene.day.set(1);
        files.put_at_once("one\n").unwrap();
        files.put("two\n").unwrap();
        assert_eq!(scene.read(0), "one\ntwo\n");
        fs::remove_dir(&in_the_way).unwrap();
        files.put("three\n").unwrap();
        assert_eq!((scene.read(0), scene.read(1)), ("one\ntwo\n".to_owned(), "three\n".to_owned()));
    }

    #[test]
    fn a_file_is_gone_on_with_and_a_line_that_was_cut_is_ended_first() {
        let scene = Scene::new();
        scene.open().unwrap().put("whole\n").unwrap();
        scene.open().unwrap().put("next\n{\"cut").unwrap();
        scene.open().unwrap().put("last\n").unwrap();
        assert_eq!(scene.read(0), "whole\nnext\n{\"cut\nlast\n");
    }

    #[test]
    fn a_directory_that_cannot_be_one_is_an_error_at_once() {
        let scene = Scene::new();
        fs::write(scene.path(), "a file").unwrap();
        assert!(scene.open().is_err());
    }
}
