//! Where a model's tokenizer comes from.
//!
//! Either a local directory (or a file in it), laid out as models are published, or the zip bundle that an engine serves.
//! A bundle comes from another machine and is read with suspicion: its sizes, its number of entries, their names and its
//! checksum are checked before anything is used, and nothing is ever written to a disk. Nothing is downloaded from a model
//! hub: a gateway that needs the internet to start is not highly available.

use std::collections::BTreeMap;
use std::io::{Cursor, Read};
use std::path::{Path, PathBuf};

use serde_json::Value;
use sha2::{Digest, Sha256};
use thiserror::Error;

/// Bytes of a bundle.
pub const MAX_BUNDLE: usize = 200 << 20;
/// Entries of a bundle.
pub const MAX_ENTRIES: usize = 50;
/// Bytes of a bundle's files, and of the files of a directory.
pub const MAX_FILES: u64 = 500 << 20;

/// The files that are used. Chat templates (`*.jinja`) beside them.
const FILES: [&str; 6] = [
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "config.json",
    "generation_config.json",
    "chat_template.json",
];

/// Why there is no tokenizer.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum SourceError {
    /// There is nothing at the path.
    #[error(
        "there is no file or directory {0} here; tokenizers are read from local paths or from the engine, \
         never downloaded from a model hub"
    )]
    NotFound(PathBuf),
    /// No `tokenizer.json`.
    #[error(
        "there is no tokenizer.json; other kinds of tokenizers (tokenizer.model, vocab.json, tiktoken) are not supported"
    )]
    NoTokenizer,
    /// A file cannot be read or is not what it should be.
    #[error("{file} cannot be read: {reason}")]
    Unreadable {
        /// Its name.
        file: String,
        /// Why.
        reason: String,
    },
    /// More bytes than allowed.
    #[error("the tokenizer's files exceed {limit} bytes")]
    TooLarge {
        /// How many are allowed.
        limit: u64,
    },
    /// More entries than allowed.
    #[error("the tokenizer bundle has {0} entries, more than the {MAX_ENTRIES} allowed")]
    TooManyEntries(usize),
    /// A name that leads out of the bundle, or comes twice.
    #[error("the tokenizer bundle has an entry named {0:?}")]
    BadName(String),
    /// The last chunk had no checksum: the stream was cut.
    #[error("the tokenizer bundle ended without its checksum")]
    NoChecksum,
    /// The bytes are not those that were sent.
    #[error("the tokenizer bundle does not match its checksum")]
    BadChecksum,
}

impl SourceError {
    fn unreadable(file: &str, reason: impl ToString) -> Self {
        Self::Unreadable { file: file.to_owned(), reason: reason.to_string() }
    }
}

/// The files of a tokenizer, in memory.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Files {
    files: BTreeMap<String, Vec<u8>>,
}

impl Files {
    /// Reads the directory at `path`, or the one that the file at `path` lies in; a file of another name than
    /// `tokenizer.json` stands for that. Blocks.
    ///
    /// # Errors
    /// There is nothing at the path, a file cannot be read, or they are too large.
    pub fn at(path: &Path) -> Result<Self, SourceError> {
        if !path.exists() {
            return Err(SourceError::NotFound(path.to_owned()));
        }
        let mut files = Self::default();
        let mut left = MAX_FILES;
        let directory = if path.is_dir() { path } else { path.parent().unwrap_or(path) };
        if !path.is_dir() {
            files.insert("tokenizer.json", std::fs::File::open(path), &mut left)?;
        }
        for folder in ["", "additional_chat_templates"] {
            let listed = match std::fs::read_dir(directory.join(folder)) {
                Ok(listed) => listed,
                Err(_) if !folder.is_empty() => continue,
                Err(error) => return Err(SourceError::unreadable(&directory.to_string_lossy(), error)),
            };
            for entry in listed.flatten() {
                let name = Path::new(folder).join(entry.file_name()).to_string_lossy().into_owned();
                if is_used(&name) && !files.files.contains_key(&name) {
                    files.insert(&name, std::fs::File::open(entry.path()), &mut left)?;
                }
            }
        }
        Ok(files)
    }

    /// Files that are in memory already, by name.
    #[must_use]
    pub fn of<N: Into<String>, B: Into<Vec<u8>>>(files: impl IntoIterator<Item = (N, B)>) -> Self {
        Self { files: files.into_iter().map(|(name, bytes)| (name.into(), bytes.into())).collect() }
    }

    /// The bytes of a file.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<&[u8]> {
        self.files.get(name).map(Vec::as_slice)
    }

    /// A file of JSON, if it is there.
    ///
    /// # Errors
    /// It is no JSON.
    pub fn json(&self, name: &str) -> Result<Option<Value>, SourceError> {
        let parse = |bytes| serde_json::from_slice(bytes).map_err(|error| SourceError::unreadable(name, error));
        self.get(name).map(parse).transpose()
    }

    /// The chat templates among the files: name without folder and ending, and text.
    ///
    /// # Errors
    /// One is not UTF-8.
    pub fn templates(&self) -> Result<Vec<(&str, &str)>, SourceError> {
        let named = self.files.iter().filter_map(|(path, bytes)| Some((path, path.strip_suffix(".jinja")?, bytes)));
        let text = named.map(|(path, name, bytes)| {
            let text = std::str::from_utf8(bytes).map_err(|error| SourceError::unreadable(path, error))?;
            Ok((name.rsplit_once('/').map_or(name, |(_, name)| name), text))
        });
        text.collect()
    }

    fn insert(&mut self, name: &str, file: std::io::Result<impl Read>, left: &mut u64) -> Result<(), SourceError> {
        let unreadable = |error| SourceError::unreadable(name, error);
        let mut bytes = Vec::new();
        let read = file.and_then(|file| file.take(*left + 1).read_to_end(&mut bytes)).map_err(unreadable)? as u64;
        *left = left.checked_sub(read).ok_or(SourceError::TooLarge { limit: MAX_FILES })?;
        self.files.insert(name.to_owned(), bytes);
        Ok(())
    }
}

fn is_used(name: &str) -> bool {
    FILES.contains(&name) || name.ends_with(".jinja")
}

/// The bundle of an engine while it arrives (`GetTokenizer`: chunks of one zip file, the last with its checksum).
#[derive(Debug, Default)]
pub struct Bundle {
    bytes: Vec<u8>,
    checksum: String,
}

impl Bundle {
    /// Takes the next chunk; `checksum` is empty except on the last.
    ///
    /// # Errors
    /// There are more bytes than a bundle may have.
    pub fn push(&mut self, chunk: &[u8], checksum: &str) -> Result<(), SourceError> {
        if self.bytes.len() + chunk.len() > MAX_BUNDLE {
            return Err(SourceError::TooLarge { limit: MAX_BUNDLE as u64 });
        }
        self.bytes.extend_from_slice(chunk);
        checksum.clone_into(&mut self.checksum);
        Ok(())
    }

    /// The files of the bundle, of which the last chunk has come.
    ///
    /// # Errors
    /// The bundle is not what it should be.
    pub fn finish(self) -> Result<Files, SourceError> {
        if self.checksum.is_empty() {
            return Err(SourceError::NoChecksum);
        }
        let digest = Sha256::digest(&self.bytes);
        let matches = self.checksum.len() == 64
            && digest
                .iter()
                .zip(self.checksum.as_bytes().chunks(2))
                .all(|(byte, text)| format!("{byte:02x}").as_bytes() == text);
        if matches { read_zip(&self.bytes) } else { Err(SourceError::BadChecksum) }
    }
}

fn read_zip(bytes: &[u8]) -> Result<Files, SourceError> {
    let unreadable = |error: zip::result::ZipError| SourceError::unreadable("the tokenizer bundle", error);
    let mut archive = zip::ZipArchive::new(Cursor::new(bytes)).map_err(unreadable)?;
    if archive.len() > MAX_ENTRIES {
        return Err(SourceError::TooManyEntries(archive.len()));
    }
    let mut files = Files::default();
    let mut left = MAX_FILES;
    // What is not used is not unpacked either, but counts as it says itself.
    for number in 0..archive.len() {
        let entry = archive.by_index(number).map_err(unreadable)?;
        let name = entry.name().to_owned();
        if !is_inside(&name) || files.files.contains_key(&name) {
            return Err(SourceError::BadName(name));
        }
        if is_used(&name) && entry.is_file() {
            files.insert(&name, Ok(entry), &mut left)?;
        } else {
            left = left.checked_sub(entry.size()).ok_or(SourceError::TooLarge { limit: MAX_FILES })?;
        }
    }
    Ok(files)
}

/// Whether a name stays where it is unpacked, on any system.
fn is_inside(name: &str) -> bool {
    !name.is_empty()
        && !name.starts_with('/')
        && !name.contains(['\\', '\0', ':'])
        && name.split('/').all(|part| part != "..")
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::io::Write;

    use zip::write::SimpleFileOptions;

    use super::*;

    fn zipped(files: &[(&str, &[u8])]) -> Vec<u8> {
        let mut writer = zip::ZipWriter::new(Cursor::new(Vec::new()));
        for (name, bytes) in files {
            writer.start_file(*name, SimpleFileOptions::default()).unwrap();
            writer.write_all(bytes).unwrap();
        }
        writer.finish().unwrap().into_inner()
    }

    fn checksum(bytes: &[u8]) -> String {
        Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
    }

    fn unpack(bytes: &[u8]) -> Result<Files, SourceError> {
        let mut bundle = Bundle::default();
        let (first, last) = bytes.split_at(bytes.len() / 2);
        bundle.push(first, "")?;
        bundle.push(last, &checksum(bytes))?;
        bundle.finish()
    }

    #[test]
    fn a_bundle_gives_the_files_that_are_used() {
        let bytes = zipped(&[("tokenizer.json", b"{}"), ("merges.txt", b"a b"), ("chat_template.jinja", b"hi")]);
        let files = unpack(&bytes).unwrap();
        assert_eq!(files, Files::of([("tokenizer.json", "{}"), ("chat_template.jinja", "hi")]));
        assert_eq!(files.templates().unwrap(), [("chat_template", "hi")]);
    }

    #[test]
    fn a_bundle_without_its_checksum_or_with_a_wrong_one_is_refused() {
        let bytes = zipped(&[("tokenizer.json", b"{}")]);
        let mut cut = Bundle::default();
        cut.push(&bytes, "").unwrap();
        assert_eq!(cut.finish(), Err(SourceError::NoChecksum));
        let mut wrong = Bundle::default();
        wrong.push(&bytes, &checksum(b"other")).unwrap();
        assert_eq!(wrong.finish(), Err(SourceError::BadChecksum));
        let mut garbage = Bundle::default();
        garbage.push(b"PK", &checksum(b"PK")).unwrap();
        assert!(matches!(garbage.finish(), Err(SourceError::Unreadable { .. })));
    }

    #[test]
    fn names_that_lead_elsewhere_are_refused() {
        for name in ["/etc/passwd", "../x.jinja", "a/../../x", "C:\\x", "a\\..\\x"] {
            let bytes = zipped(&[(name, b"x")]);
            assert_eq!(unpack(&bytes), Err(SourceError::BadName(name.to_owned())));
        }
    }

    #[test]
    fn too_many_entries_and_too_many_bytes_are_refused() {
        let names: Vec<String> = (0..51).map(|number| format!("{number}.jinja")).collect();
        let files: Vec<(&str, &[u8])> = names.iter().map(|name| (name.as_str(), b"".as_slice())).collect();
        assert_eq!(unpack(&zipped(&files)), Err(SourceError::TooManyEntries(51)));
        let mut bundle = Bundle::default();
        let chunk = vec![0; MAX_BUNDLE / 2];
        bundle.push(&chunk, "").unwrap();
        bundle.push(&chunk, "").unwrap();
        assert_eq!(bundle.push(&[0], ""), Err(SourceError::TooLarge { limit: MAX_BUNDLE as u64 }));
    }

    #[test]
    fn a_directory_or_a_file_in_it_is_read() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("tokenizer.json"), "{}").unwrap();
        std::fs::write(folder.path().join("model.safetensors"), "no").unwrap();
        std::fs::create_dir(folder.path().join("additional_chat_templates")).unwrap();
        std::fs::write(folder.path().join("additional_chat_templates/tool_use.jinja"), "t").unwrap();
        let files = Files::at(folder.path()).unwrap();
        assert_eq!(files.get("tokenizer.json"), Some(b"{}".as_slice()));
        assert_eq!(files.get("model.safetensors"), None);
        assert_eq!(files.templates().unwrap(), [("tool_use", "t")]);
        assert_eq!(Files::at(&folder.path().join("tokenizer.json")).unwrap(), files);
        let missing = Files::at(Path::new("Qwen/Qwen3-8B")).unwrap_err().to_string();
        assert!(missing.contains("never downloaded"), "{missing}");
    }
}
