//! Completeness of checkpoints: all tensors are present, and all are read.

use super::*;

#[test]
fn what_an_index_lists_and_nothing_needs_does_no_harm() {
    let directory = scratch("load-index-more");
    variant("llama2").write(&directory, 2).expect("a checkpoint");
    let text = std::fs::read(directory.join(INDEX)).expect("an index");
    let mut index: Value = serde_json::from_slice(&text).expect("an index");
    let map = index["weight_map"].as_object_mut().expect("a map");
    map.insert(
        "model.layers.0.self_attn.rotary_emb.inv_freq".into(),
        "model-00001-of-00002.safetensors".into(),
    );
    map.insert("vision_tower.patches.weight".into(), "never-downloaded.safetensors".into());
    std::fs::write(directory.join(INDEX), index.to_string()).expect("a file");
    Checkpoint::open(&directory, &ReadFiles).expect("all that the model needs is there");
}

#[test]
fn a_tensor_that_nothing_reads_is_refused_by_name() {
    let with = |name: &str, tensor: &str| {
        let directory = scratch(&format!("load-{name}"));
        variant("llama2").write(&directory, 1).expect("a checkpoint");
        let file = directory.join("model.safetensors");
        let bytes = std::fs::read(&file).expect("a file");
        let end = 8 + u64::from_le_bytes(*bytes.first_chunk().expect("a length")) as usize;
        let mut header: Map<String, Value> = serde_json::from_slice(&bytes[8..end]).expect("a header");
        let at = bytes.len() - end;
        header.insert(tensor.into(), json!({"dtype": "F32", "shape": [1], "data_offsets": [at, at + 4]}));
        let data = [&bytes[end..], &1f32.to_le_bytes()].concat();
        write_parts(&file, Value::Object(header).to_string().as_bytes(), &data);
        Checkpoint::open(&directory, &ReadFiles)
    };
    for tensor in ["model.layers.0.self_attn.o_proj.bias", "model.layers.1.pre_feedforward_layernorm.weight"]
    {
        let error = with("unread", tensor).expect_err("refused").to_string();
        assert_says(&error, &["model.safetensors", tensor, "nothing here reads it"]);
    }
    with("derived", "model.layers.0.self_attn.rotary_emb.inv_freq")
        .expect("it follows from the configuration");
}

#[test]
fn a_folder_without_weights_says_what_is_there_instead() {
    let directory = scratch("load-none");
    variant("llama2").write(&directory, 1).expect("a checkpoint");
    let (safetensors, other) = (directory.join("model.safetensors"), directory.join("pytorch_model.bin"));
    std::fs::rename(&safetensors, &other).expect("renamed");
    let error = || Checkpoint::open(&directory, &ReadFiles).expect_err("no weights").to_string();
    assert_says(&error(), &["there are no weights", "pytorch_model.bin", "not supported"]);
    std::fs::rename(&other, directory.join("model-00001-of-00002.safetensors")).expect("renamed");
    assert_says(&error(), &["model-00001-of-00002.safetensors", "the index was not downloaded"]);
    std::fs::remove_file(directory.join("model-00001-of-00002.safetensors")).expect("removed");
    assert_says(&error(), &["--random-weights"]);
}

#[test]
fn a_share_of_a_repeating_checkpoint_is_that_of_the_whole() {
    let checkpoint = variant("llama3").repeating().expect("a checkpoint");
    let whole = MemoryDevice::new(false, 64);
    let share = &checkpoint.config.divided(2).expect("shares").shares()[1].clone();
    let weights = checkpoint.place_share(&whole, share, &mut |_, _| {}).expect("placed").expect("weights");
    let location = &checkpoint.tensors["model.layers.0.mlp.down_proj.weight"];
    let stored = checkpoint.bytes("model.layers.0.mlp.down_proj.weight").expect("stored");
    let cyclic = stored.iter().copied().cycle().take(location.bytes() as usize).collect::<Vec<u8>>();
    let (width, element) = (location.shape[1] as usize, location.dtype.size_bytes() as usize);
    let columns = share.inner.start as usize * element..share.inner.end as usize * element;
    let expected: Vec<u8> =
        cyclic.chunks_exact(width * element).flat_map(|row| row[columns.clone()].to_vec()).collect();
    let tensor = weights.get(0, Weight::Down).expect("an MLP");
    let mut bytes = vec![0; tensor.slice.bytes as usize];
    whole.read(&tensor.slice, &mut bytes).expect("read");
    assert!(bytes == expected);
}
